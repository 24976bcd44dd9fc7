"""Modules that do what a plain one does in a way of their own come to the same under every method."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from tiny import Learner, assert_equal, trainer

METHODS = sorted(lit_pfl.methods.__all__)
#: which look at a batch again in one way or another
AGAIN = ("APFL", "APPLE", "Ditto", "FML", "FedEM", "FedNTD", "FedProto", "FedSLR", "FedSpa", "MOON", "PerFedAvg")


class Plain(Learner):
    """Halves its inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5)), nn.Linear(5, 3))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch["x"] * 0.5), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("acc", (self(batch["x"]).argmax(1) == batch["labels"]).float().mean())


class InPlace(Plain):
    """Changes its batch, which some methods need more than once in a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(self(batch["x"].mul_(0.5)), labels)


class Template(Plain):
    """Finds itself in its Trainer and calls ``forward`` by its name, as in a well-known template of projects."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.forward(batch["x"] * 0.5), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("acc", (self.forward(batch["x"]).argmax(1) == batch["labels"]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


class Meta(Tensor):
    """A subclass of tensors, as MONAI's, that what is computed from it is of too, and that is not sliced at will."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            raise ValueError("a slice has no metadata")
        return super().__torch_function__(func, types, args, kwargs)


class Dicts(L.LightningDataModule):
    """Batches that are made anew every time, as a DataLoader makes them."""

    def __init__(self, kind: type[Tensor] = Tensor) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        rows = [{"x": torch.randn(6, generator=draw).as_subclass(self.kind), "labels": i % 3} for i in range(12)]
        return torch.utils.data.DataLoader(rows, batch_size=6)

    val_dataloader = train_dataloader


def trained(method: str, make: Callable[[], L.LightningModule], kind: type[Tensor] = Tensor) -> Any:
    """Return what two clients come to, and their scores; skip what the method refuses."""
    torch.manual_seed(0)
    federation = Federation(getattr(lit_pfl.methods, method)(learner=make()), seed=0, threads=1)
    try:
        trainer(2, num_sanity_val_steps=2).fit(federation, datamodule=PerClient([Dicts(kind), Dicts(kind)]))
    except ConfigError as error:
        pytest.skip(str(error))
    states = {client: module.state_dict() for client, module in federation.clients.items()}
    return states, federation.trainer.callback_metrics


WAYS: dict[str, tuple[Callable[[], L.LightningModule], type[Tensor], tuple[str, ...]]] = {
    "batches changed in place": (InPlace, Tensor, AGAIN),
    "batches of a subclass": (Plain, Meta, ("Ditto", "FedSpa")),
    "as in a template": (Template, Tensor, ("APFL", "FD", "FedAS", "FedDBE", "FedEM", "FedRS", "GPFL", "PFedLA")),
}


def cases() -> Iterator[Any]:
    """Yield a method with the ways in which it is tried by default, and with the others."""
    for method in METHODS:
        first = [way for way, (_, _, methods) in WAYS.items() if method in methods]
        for ways, marks in ((first, ()), ([way for way in WAYS if way not in first], pytest.mark.slow)):
            if ways:
                yield pytest.param(method, ways, marks=marks, id=f"{method}: {', '.join(ways)}")


@pytest.mark.parametrize(("method", "ways"), cases())
def test_it_trains_as_a_plain_one_does(method, ways):
    expected = trained(method, Plain)
    for way in ways:
        make, kind, _ = WAYS[way]
        assert_equal(trained(method, make, kind), expected, way)
