"""Steps that change their batch in place, under methods that need it more than once in a step."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.learners.steps import own_batch
from lit_pfl.testing import assert_equal

METHODS = sorted(lit_pfl.methods.__all__)
#: which look at a batch again in one way or another
AGAIN = ("APFL", "APPLE", "Ditto", "FML", "FedEM", "FedNTD", "FedProto", "FedSLR", "FedSpa", "MOON", "PerFedAvg")


class Meta(Tensor):
    """A subclass of tensors, as MONAI's, that what is computed from it is of too, and that is not sliced at will."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            raise ValueError("a slice has no metadata")
        return super().__torch_function__(func, types, args, kwargs)


class Mixing(L.LightningModule):
    """Halves images and takes labels out of the batch, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.in_place:
            labels = batch.pop("labels")
            batch["x"].mul_(0.5)
        else:
            labels, batch = batch["labels"], {"x": batch["x"] * 0.5}
        return nn.functional.cross_entropy(self(batch["x"]), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dicts(L.LightningDataModule):
    """Batches that are made anew every time, as a DataLoader makes them."""

    def __init__(self, kind: type[Tensor]) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        rows = [{"x": torch.randn(6, generator=draw).as_subclass(self.kind), "labels": i % 3} for i in range(12)]
        return torch.utils.data.DataLoader(rows, batch_size=6)


def trained(method: str, in_place: bool, kind: type[Tensor] = Tensor) -> Any:
    torch.manual_seed(0)
    client = getattr(lit_pfl.methods, method)(learner=Mixing(in_place), head="^out", encoder="body")
    federation = Federation(client, seed=0, threads=1)
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(federation, datamodule=PerClient([Dicts(kind), Dicts(kind)]))
    return {client: module.state_dict() for client, module in federation.clients.items()}


def cases(quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(method, marks=[] if method in quick else pytest.mark.slow) for method in METHODS]


@pytest.mark.parametrize("method", cases(AGAIN))
def test_a_step_may_change_its_batch_in_place(method):
    try:
        expected = trained(method, in_place=False)
    except ConfigError as error:
        pytest.skip(str(error))
    assert_equal(trained(method, in_place=True), expected, "client")


@pytest.mark.parametrize("method", cases(("Ditto", "FedSpa")))
def test_a_batch_may_be_of_a_tensor_subclass(method):
    try:
        expected = trained(method, in_place=False)
    except ConfigError as error:
        pytest.skip(str(error))
    assert_equal(trained(method, in_place=False, kind=Meta), expected, "client")


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def clone(self) -> "Graph":
        return Graph(self.x.clone())


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_copy_has_tensors_of_its_own(kind):
    batch = kind([torch.ones(2), torch.zeros(2)])
    copy = own_batch(batch)
    copy[0].add_(1)
    assert type(copy) is kind
    assert batch[0].tolist() == [1, 1]
    assert copy[0].tolist() == [2, 2]


def test_so_has_that_of_what_is_nested_or_knows_how_to_copy_itself():
    x = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    nested = own_batch({"inputs": {"x": x}, "names": ["a"], "packed": packed})
    nested["inputs"]["x"].add_(1)
    nested.pop("names")
    own_batch(Graph(x)).x.add_(1)
    own_batch(x).add_(1)
    nested["packed"].data.add_(1)
    own_batch((Graph(x), x))[0].x.add_(1)
    assert packed.data.tolist() == x.tolist() == [1, 1]
