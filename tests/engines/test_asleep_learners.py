"""Learners that change in training what no ``state_dict()`` holds, or hold unusual things: asleep as awake."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.functional import cross_entropy

from lit_pfl import Federation
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, FedPer, PFedSim, StandAlone
from lit_pfl_callbacks.tensors import copied
from tiny import Learner, assert_equal, client, digits, trainer


class Net(Learner):
    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 10), momentum=0.9)

    def validation_step(self, batch, batch_idx):
        self.log("loss", cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


def fit(method, awake=None, rounds=6, clients=4, folder=None, resume=None, callbacks=(), scored=1.0, **options):
    options = {"seed": 3, "threads": 1, "participation": 2, "evaluate": "after", **options}
    federation = Federation(method, engine=Local(awake=awake), **options)
    saving = [] if folder is None else [LastCheckpoint(folder)]
    fitting = trainer(rounds, callbacks=[*saving, *callbacks], enable_checkpointing=bool(saving),
                      limit_val_batches=scored, limit_test_batches=scored)  # fmt: skip
    fitting.fit(federation, datamodule=digits(clients), ckpt_path=resume)
    return federation


def own_state(module):
    return copied(module.state_dict())


def same(one, other):
    assert one.rows == other.rows
    assert_equal(one.ask(own_state), other.ask(own_state))
    assert_equal(one.coordinator.state_dict(), other.coordinator.state_dict())


class Unfreezes(Net):
    """Trains a part of it from the second epoch on only."""

    def __init__(self, part="body"):
        super().__init__()
        self.part = part
        self.get_submodule(part).requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.get_submodule(self.part).requires_grad_(True)


class Freezes(Net):
    """Trains its body in the first epoch only."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.body.requires_grad_(False)


class Trained(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=0.1)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.learner.head)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.learner.head, optimizer)


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "learner", "callbacks"),
    [
        (FedAvg, Unfreezes, []),
        (FedAvg, Freezes, []),
        (FedPer, partial(Unfreezes, "head"), []),
        (FedPer, Trained, [Finetuning()]),
    ],
)
def test_what_is_frozen_and_unfrozen_in_training_stays_so(tmp_path, kind, learner, callbacks):
    def run(*args, **options):
        return fit(kind(learner=learner()), *args, client_trainer={"callbacks": callbacks}, **options)

    whole = run()
    same(whole, run(1))
    for before, after in ((None, 1), (1, None)):
        run(before, 4, folder=tmp_path / str(before))
        same(whole, run(after, folder=tmp_path / str(before), resume=tmp_path / str(before) / "last.ckpt"))


def test_to_be_scored_with_what_others_have_unfrozen_changes_nothing():
    federation = fit(FedAvg(learner=Unfreezes()), clients=6)
    [absent] = set(range(6)).difference(*(federation.participants(k) for k in range(6)))
    assert_equal(dict(federation.clients[absent].learner.named_parameters()), dict(Unfreezes().named_parameters()))


class Annealed(Net):
    def validation_step(self, batch, batch_idx):
        self.log("loss", cross_entropy(self(batch[0]), batch[1]) * (1 + self.global_step))
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [FedAvg, FedPer])
def test_a_validation_may_ask_for_steps_and_rates(tmp_path, kind):
    whole = fit(kind(learner=Annealed()), rounds=4)
    assert len({row.scores["rate"] for row in whole.rows}) > 1
    same(whole, fit(kind(learner=Annealed()), 1, 4))
    fit(kind(learner=Annealed()), rounds=3, folder=tmp_path)
    same(whole, fit(kind(learner=Annealed()), rounds=4, folder=tmp_path, resume=tmp_path / "last.ckpt"))


class Prototypes(Net):
    """Changes a table that never trains from the second epoch on, but not its beginning."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 16), requires_grad=False)

    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            self.table[1:] += 1.0
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("awake", [None, 1])
def test_a_late_change_of_what_clients_hold_once_is_seen(awake):
    with pytest.raises(ConfigError, match=r"^model\.learner: Prototypes has changed 'table'"):
        fit(StandAlone(learner=Prototypes()), awake, participation=1.0)


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("neighbours", torch.eye(8).to_sparse())


class Extra(Net):
    """Has tensors in its extra state, and takes its own part out of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(3)

    def get_extra_state(self):
        return {"mean": self.mean, "seen": [self.mean]}

    def set_extra_state(self, state):
        self.mean = state["mean"]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1.0

    def on_load_checkpoint(self, checkpoint):
        checkpoint.pop("mine")


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("learner", [Sparse, Extra])
def test_unusual_states(tmp_path, learner):
    whole = fit(FedAvg(learner=learner()))
    assert fit(FedAvg(learner=learner()), 1).rows == whole.rows
    for before, after in ((None, 1), (1, None)):
        folder = tmp_path / str(before)
        fit(FedAvg(learner=learner()), before, 3, folder=folder)
        resumed = fit(FedAvg(learner=learner()), after, folder=folder, resume=folder / "last.ckpt")
        assert resumed.rows == whole.rows


class Arrays(Extra):
    def get_extra_state(self):
        return {"mean": np.zeros(3)}


@pytest.mark.parametrize("awake", [None, 1])
def test_objects_in_a_state_are_named(tmp_path, awake):
    fit(FedAvg(learner=Arrays()), awake, 2, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"holds a numpy\S+, and only tensors and plain values are loaded"):
        fit(FedAvg(learner=Arrays()), awake, folder=tmp_path, resume=tmp_path / "last.ckpt")


@pytest.mark.seconds
@pytest.mark.parametrize("awake", [None, 1])
@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE")
def test_objects_in_a_state_are_loaded_where_pytorch_is_told_to(tmp_path, awake, monkeypatch):
    whole = fit(FedAvg(learner=Arrays()), awake)
    fit(FedAvg(learner=Arrays()), awake, 2, folder=tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert fit(FedAvg(learner=Arrays()), awake, folder=tmp_path, resume=tmp_path / "last.ckpt").rows == whole.rows


def own_parameters(module):
    return dict(module.learner.named_parameters())


@pytest.mark.parametrize(("awake", "keep_trained"), [(None, True), (1, True), (1, False)])
def test_answers_about_the_scored_state_are_of_that_state(awake, keep_trained):
    federation = fit(FedPer(learner=Net()), awake, keep_trained=keep_trained)
    for k, found in federation.ask(own_parameters, as_scored=True).items():
        assert_equal(found, dict(federation.standalone(k).named_parameters()))


@pytest.mark.seconds
@pytest.mark.parametrize("then", [None, 1])
def test_what_a_client_is_without_is_known_to_checkpoints_of_everybody(tmp_path, then):
    def run(awake, rounds, resume=None):
        options = {"clients": 12, "folder": tmp_path, "resume": resume, "keep_trained": False, "seed": 5, "scored": 0}
        fit(client(PFedSim, warmup_rounds=3), awake, rounds, **options)

    run(1, 4)
    run(None, 5, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"^federation\.keep_trained=False: client \d+ needs its own 'learner"):
        run(then, 14, tmp_path / "last.ckpt")
