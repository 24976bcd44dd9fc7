"""Every method on modules that know nothing of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lit_pfl.methods
from foreign import PROJECTS, Project
from lit_pfl import Client, Federation
from lit_pfl.core.classifying import Classifying
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.testing.method_tester import BackToFront
from lit_pfl_callbacks.tensors import tensors_of
from tiny import ALWAYS, OF_THE_PAPERS, assert_equal, trainer, weights

METHODS = {name: getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__}

#: methods that look at what goes into a head and comes out of it, and those that need class labels besides
ON_HEADS = [name for name, kind in METHODS.items() if issubclass(kind, Classifying)]
ON_LABELS = [name for name in ON_HEADS if METHODS[name].needs_labels]
ON_ADAPTERS = [name for name, kind in METHODS.items() if issubclass(kind, lit_pfl.methods.FedIT)]
#: what cannot be, and the words of the one line that says why, where head and encoder are named
REFUSED = {
    **{("FedMA", project): "has no attribute `backbone`" for project in PROJECTS},
    **{("PsiNet", project): "PsiNet divides a `backbone` whose head is a linear layer" for project in PROJECTS},
    **{(method, "Regression"): "use torch.optim.SGD" for method in ("FedNova", "PFedMe", "Scaffold")},
    **{("FedBN", project): "has no batch norm" for project in PROJECTS if project not in ("Screening", "Segmentation")},
    **{(name, project): f"{name} trains adapters, and .* has none" for name in ON_ADAPTERS for project in PROJECTS},
    ("APFL", "Segmentation"): "use model.mixing=parameters",
    **{(method, "Boring"): f"{method} trains a body, and this one has no weights" for method in ("FedBABU",)},
    **{(method, project): "has no class labels"
       for method in ON_LABELS for project in ("Boring", "Regression", "Screening")},
    **{(method, "Boring"): f"{method} trains the body alone" for method in ("FedAH", "FedPAC", "FedRep", "FLUTE")},
    **{(method, project): r"model.head: .* needs a head (that returns \(B, C\) logits|with a linear layer)"
       for method in ON_HEADS for project in ("LSTM", "Transformer", "Segmentation")},
}  # fmt: skip
#: what cannot be once the head is named
NAMED = {
    (method, project): "needs a two-dimensional convolution or a linear layer in the body"
    for method in ("FactorizedFL", "PFedPara")
    for project in ("LSTM", "Boring")
}
#: and where they are not named
NAMELESS = {
    **{(method, project): f"{method} has to know which parameters of {{name}} are its head"
       for method in ("FedBABU", "FedPer", "FedRep", "LGFedAvg", "FedAH", "PFedSim", *ON_HEADS)
       for project in PROJECTS if project != "Screening"},
    **{("SimFed", project): "SimFed compares what encoders make of an input; say which part of {name} is one"
       for project in ("LSTM", "Transformer", "Boring", "Regression")},
}  # fmt: skip
CELLS = [(method, project) for method in METHODS for project in PROJECTS]


def trained(cells: Any) -> list[Any]:
    """Return cells as parameters: at once a few, if there is time every sixth of the papers' methods, else all."""
    cells = list(cells)
    quick = [(name, data) for name, data in cells if name in (ALWAYS if data == "Regression" else ("FedAvg", "Ditto"))]
    slow = [cell for cell in cells if cell[0] in OF_THE_PAPERS and cell not in quick][::6]
    marks = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(quick, ())}
    return [pytest.param(*cell, marks=marks.get(cell, pytest.mark.full)) for cell in cells]


def fit(
    project: Project,
    method: Client,
    folder: Path,
    rounds: int,
    kind: type[Federation] = Federation,
    resume: bool = False,
) -> Federation:
    federation = kind(method, **{"seed": 3, "threads": 1, "local_epochs": 2, "participation": 2, **project.federation})
    checkpoint: Any = LastCheckpoint(folder)
    fitting = trainer(rounds, callbacks=[checkpoint], enable_checkpointing=True)
    fitting.fit(federation, datamodule=project.data(), ckpt_path=folder / "last.ckpt" if resume else None)
    return federation


@pytest.mark.seconds
@pytest.mark.few(3)
@pytest.mark.parametrize(("method", "project"), trained(cell for cell in CELLS if cell not in REFUSED | NAMED))
def test_a_method_and_somebody_s_module(method, project, tmp_path):
    """It trains; interrupted, resumed and in another order of clients it comes to the same."""
    there = PROJECTS[project]
    straight = fit(there, there.method(METHODS[method]), tmp_path / "straight", rounds=3)
    fit(there, there.method(METHODS[method]), tmp_path / "other", rounds=2, kind=BackToFront)
    other = fit(there, there.method(METHODS[method]), tmp_path / "other", rounds=3, kind=BackToFront, resume=True)
    assert_equal(weights(other), weights(straight))
    assert other.traffic.state_dict() == straight.traffic.state_dict()
    assert sorted(other.rows, key=repr) == sorted(straight.rows, key=repr)  # also of those who did not take part since

    assert {frozenset(row.scores) for row in straight.rows} == {there.metrics}
    assert not straight.coordinator.refused
    first = tensors_of(there.method(METHODS[method]).learner)
    for client in straight.clients.values():
        own = tensors_of(client.learner)
        assert all(tensor.isfinite().all() for tensor in own.values())
        assert not all(torch.equal(own[name], tensor) for name, tensor in first.items() if name in own)


@pytest.mark.parametrize(("method", "project"), REFUSED | NAMED)
def test_what_cannot_be_is_said_in_a_line(method, project, tmp_path):
    there = PROJECTS[project]
    with pytest.raises(ConfigError, match=(REFUSED | NAMED)[method, project]) as error:
        fit(there, there.method(METHODS[method]), tmp_path, rounds=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("method", "project"), [c for c in CELLS if c in NAMELESS | REFUSED])
def test_parts_that_a_method_has_to_know_are_asked_for(method, project, tmp_path):
    there = PROJECTS[project]
    unnamed = METHODS[method](learner=there.make())
    words = NAMELESS.get((method, project)) or REFUSED[method, project]
    with pytest.raises(ConfigError, match=words.format(name=type(unnamed.learner).__name__)) as error:
        fit(there, unnamed, tmp_path, rounds=1)
    assert "\n" not in str(error.value)


@pytest.mark.few(5)
@pytest.mark.parametrize(("method", "project"), trained(c for c in CELLS if c not in NAMELESS | REFUSED))
def test_other_methods_do_without_being_told(method, project, tmp_path):
    there = PROJECTS[project]
    fit(there, METHODS[method](learner=there.make()), tmp_path, rounds=1)
