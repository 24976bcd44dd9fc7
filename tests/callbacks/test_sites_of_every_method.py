"""Every method on classifiers of images, tables and texts, by the callback alone: stopped, it goes on with its bits."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_pfl.methods
from lit_pfl import Client
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedBN, FedIT, FedMA, PsiNet
from lit_pfl_callbacks import FederatedLoop
from tiny import Learner, assert_equal, trainer

METHODS = {name: getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__}
#: those that ask for networks of another kind, tried on them in tests of their own
OTHERS = (FedBN, FedIT, FedMA, PsiNet)
SITES, ROUNDS, EPOCHS, CLASSES = 3, 3, 2, 3


class Pooled(nn.Module):
    """(B, T) characters to (B, 6) features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent, self.out = nn.Embedding(20, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, characters: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(characters))[0].mean(1))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), nn.ReLU()
    )


def table() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())


def inputs(kind: str, number: int, generator: torch.Generator) -> Tensor:
    if kind == "text":
        return torch.randint(20, (number, 7), generator=generator)
    return torch.randn(number, *{"image": (1, 8, 8), "table": (5,)}[kind], generator=generator)


BODIES: dict[str, Callable[[], nn.Module]] = {"image": images, "table": table, "text": Pooled}


class Classifier(Learner):
    """Somebody's module, that knows nothing of any method."""

    def __init__(self, kind: str) -> None:
        super().__init__(BODIES[kind](), nn.Linear(6, CLASSES), lr=0.05)
        example = inputs(kind, 4, torch.Generator().manual_seed(0))
        self.example_input_array = example, torch.arange(4) % CLASSES  # as what its training step gets

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def samples(kind: str, site: int) -> DataLoader:
    generator = torch.Generator().manual_seed(site)
    labels = torch.arange(12) % CLASSES
    labels[site] = labels[site - 1]  # sites differ in how many samples a class has
    return DataLoader(TensorDataset(inputs(kind, 12, generator), labels), 4)


def run(
    method: type[Client], kind: str, folder: Path, state: Any = None, paths: Any = None
) -> tuple[list[Client], list[Any], Any]:
    """Run sites under Trainers of their own; return their modules, the server's states and checkpoints by round."""
    hub, modules, states, paths_of = LocalHub(seed=1), [], [], []
    for site in range(SITES):
        torch.manual_seed(0)
        module = method(learner=Classifier(kind), head="^head", encoder="body")
        each = ModelCheckpoint(
            folder / f"{site}",
            filename="{epoch}",
            save_top_k=-1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        fitting = trainer(
            ROUNDS * EPOCHS, callbacks=[FederatedLoop(hub.link, every_n_epochs=EPOCHS), each], enable_checkpointing=True
        )
        data, start = samples(kind, site), None if paths is None else paths[site]
        hub.add(
            site,
            lambda t=fitting, m=module, x=data, p=start: t.fit(m, x, x, ckpt_path=p, weights_only=p is not None),
        )
        modules.append(module)
        paths_of.append(folder / f"{site}" / f"epoch={EPOCHS - 1}.ckpt")
    hub.run(
        state=state,
        after_round=lambda coordinator: states.append(copy.deepcopy(coordinator.state_dict())),
    )
    return modules, states, paths_of


def cells() -> list[Any]:
    """Return every method on every kind of input; on one of them, in turn, without `-m full`."""
    names = [name for name, method in METHODS.items() if not issubclass(method, OTHERS)]
    return [
        pytest.param(name, kind, marks=[pytest.mark.full] * ((i + j) % len(BODIES) != 0))
        for i, name in enumerate(names)
        for j, kind in enumerate(BODIES)
    ]  # fmt: skip


@pytest.mark.seconds
@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "kind"), cells())
def test_every_method_by_the_callback_alone(name, kind, tmp_path):
    whole, states, paths = run(METHODS[name], kind, tmp_path / "whole")
    assert [state["round"] for state in states] == [1, 2, 3]
    resumed, _, _ = run(METHODS[name], kind, tmp_path / "resumed", states[0], paths)
    first = dict(METHODS[name](learner=Classifier(kind), head="^head", encoder="body").learner.named_parameters())
    for one, other in zip(resumed, whole, strict=True):
        assert_equal(one.state_dict(), other.state_dict())
        own = dict(other.learner.named_parameters())
        assert all(weight.isfinite().all() for weight in own.values())
        assert any(not torch.equal(own[name], weight) for name, weight in first.items() if name in own)


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize("check", [0, 2], ids=["", "sanity check"])
@pytest.mark.parametrize("name", ["FedAvg", "Floco", "KNNPer", "FedBABU"])
def test_a_site_that_shuffles_and_drops_out_goes_on_with_its_bits(name, check, tmp_path, monkeypatch):
    """KNNPer and FedBABU read training data to be scored, in the sanity check too, whose draws Lightning puts back."""
    monkeypatch.setattr(sys.modules[__name__], "trainer", partial(trainer, num_sanity_val_steps=check))
    monkeypatch.setitem(BODIES, "table", lambda: nn.Sequential(table(), nn.Dropout()))
    monkeypatch.setattr(
        sys.modules[__name__], "samples", lambda kind, site, make=samples: DataLoader(make(kind, site).dataset, 4, True)
    )
    whole, states, paths = run(METHODS[name], "table", tmp_path / "whole")
    resumed, _, _ = run(METHODS[name], "table", tmp_path / "resumed", states[0], paths)
    for one, other in zip(resumed, whole, strict=True):
        assert_equal(one.state_dict(), other.state_dict())


def test_a_checkpoint_that_was_tested_has_no_say_in_the_draws_of_a_new_fit(tmp_path):
    _, _, [path, *_] = run(METHODS["FedAvg"], "table", tmp_path)
    drawn = []
    for tested in (False, True):
        hub, module = LocalHub(seed=1), METHODS["FedAvg"](learner=Classifier("table"), head="^head", encoder="body")
        seen = LambdaCallback(on_train_batch_start=lambda *_: drawn.append(torch.get_rng_state()))
        fitting = trainer(1, callbacks=[FederatedLoop(hub.link), seen])
        if tested:
            fitting.validate(module, samples("table", 0), ckpt_path=path, weights_only=True, verbose=False)
        hub.add(0, lambda t=fitting, m=module: t.fit(m, samples("table", 0)))
        hub.run()
    assert torch.equal(drawn[0], drawn[len(drawn) // 2])
