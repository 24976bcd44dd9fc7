"""Clients that sleep on disk: the same bits, wherever a run is stopped."""

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pfl import Federation
from lit_pfl.core.sharing import NORM_STATISTICS
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError, SaveError
from lit_pfl.lightning_internals import AtomicCheckpointIO, Content, LastCheckpoint, StateFiles, state_files
from lit_pfl.methods import Ditto, FedAvg, FedMA, FedPer, FedProto, PFedSim, PsiNet, Scaffold, SimFed
from lit_pfl.models import MLP
from lit_pfl_callbacks import ClientsTable, RunLogger
from lit_pfl_callbacks.tensors import copied
from tiny import GroupNet, TinyNet, assert_equal, client, digits, run, trainer

METHODS = {kind.__name__: kind for kind in (FedAvg, Ditto, Scaffold, FedPer, SimFed, FedMA, FedProto, PsiNet)}
ROUNDS = 4


def own_state(module):
    return copied(module.state_dict())


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class FrozenNet(TinyNet):
    """A network whose convolution never trains."""

    def __init__(self, channels, classes):
        super().__init__(channels, classes)
        self.body[0].requires_grad_(False)


class MovingNet(FrozenNet):
    """One that changes it all the same, in every step."""

    def forward(self, images):
        if self.training and torch.is_grad_enabled():
            self.body[0].weight.data.mul_(1.01)
        return super().forward(images)


def made(method):
    """Return a method with batch norm, dropout and momentum, as far as it can do with them."""
    if method in NETWORKS:
        return client(FedPer, backbone=NETWORKS[method])
    options = {"Scaffold": {"optimizer": plain_sgd}, "FedMA": {"backbone": MLP}}
    return client(METHODS[method], **options.get(method, {}))


def fit(folder, method="FedAvg", awake=None, rounds=ROUNDS, resume=None, callbacks=(), plugins=None, **options):
    """Run a federation, or go on with it from a checkpoint."""
    logger = RunLogger(str(folder.parent), name="", version=folder.name)
    federation = Federation(
        made(method) if isinstance(method, str) else method, seed=3, threads=1,
        **{"participation": 3, "evaluate_clients": 4, "engine": Local(awake=awake), **options},
    )  # fmt: skip
    fitting = trainer(
        rounds, logger=logger, callbacks=[ClientsTable(show=False), LastCheckpoint(), *callbacks],
        enable_checkpointing=True, plugins=plugins,
    )  # fmt: skip
    fitting.fit(federation, datamodule=digits(6, batch_size=32), ckpt_path=resume)
    return federation


NETWORKS = {"frozen": FrozenNet, "moving": MovingNet}


def last(folder):
    return folder / "checkpoints" / "last.ckpt"


def assert_same_run(a, b, *folders):
    """See that two runs have come to the same, and have written the same tables."""
    assert_equal(a.ask(own_state), b.ask(own_state))
    assert_equal(a.coordinator.state_dict(), b.coordinator.state_dict())
    assert a.rows == b.rows
    assert a.other_rows == b.other_rows
    for name in ("metrics.csv", "clients.csv"):
        assert (folders[0] / name).read_text() == (folders[1] / name).read_text(), name


def files(folder):
    return {path.name for path in (folder / "checkpoints" / state_files.FOLDER).rglob("*") if path.is_file()}


def referred(path):
    return {Path(name).name for name in torch.load(path)["federation"][state_files.ASLEEP].splitlines()}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedAvg", {}),
        ("FedAvg", {"evaluate": "after", "evaluate_clients": 1.0, "local_epochs": 2}),
        ("FedAvg", {"participation": 1.0}),
        ("Ditto", {}),
        ("Scaffold", {"participation": 0.5}),
        ("FedPer", {}),
        ("SimFed", {"participation": 4}),
        ("FedMA", {}),
        ("FedProto", {}),
        ("frozen", {}),
        ("moving", {}),
    ],
)
def test_clients_that_sleep_come_to_the_same_bits(tmp_path, method, options):
    everybody = fit(tmp_path / "all", method, **options)
    two = fit(tmp_path / "two", method, awake=2, **options)
    assert len(two.clients) == 2
    assert_same_run(everybody, two, tmp_path / "all", tmp_path / "two")
    assert files(tmp_path / "two") == referred(last(tmp_path / "two"))


@pytest.mark.seconds
def test_a_client_that_wakes_after_others_have_changed_a_frozen_weight(tmp_path):
    everybody, one = fit(tmp_path / "all", "moving"), fit(tmp_path / "one", "moving", awake=1)
    assert_same_run(everybody, one, tmp_path / "all", tmp_path / "one")


class Stopped(Exception):
    pass


class StopsInRound3(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.current_epoch == 2:
            raise Stopped


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after"), [(2, 2), (None, 2), (2, None), pytest.param(2, 3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["FedAvg", "Ditto", "frozen", "moving"])
def test_a_run_is_resumed_with_and_without(tmp_path, method, before, after):
    whole = fit(tmp_path / "whole", method)
    with pytest.raises(Stopped):
        fit(tmp_path / "two", method, before, callbacks=[StopsInRound3()])
    resumed = fit(tmp_path / "two", method, after, resume=last(tmp_path / "two"))
    assert_same_run(whole, resumed, tmp_path / "whole", tmp_path / "two")
    if after:
        assert files(tmp_path / "two") == referred(last(tmp_path / "two"))


def test_what_never_trains_is_not_in_a_file(tmp_path):
    fit(tmp_path / "run", "frozen", awake=2, rounds=1)
    states = [torch.load(path) for path in (tmp_path / "run").rglob("*.state")]
    assert len(states) == 3
    for state in states:
        weights = {name for name in state["clients"]["state_dict"] if name.endswith("body.0.weight")}
        assert not weights
        assert sorted(name.rpartition("body.")[2] for name in state["constant"]) == ["0.bias", "0.weight"]


class Kill(AtomicCheckpointIO):
    """Kills the process when states are written and their checkpoint is not, or when that is in place."""

    def __init__(self, after):
        super().__init__()
        self.after, self.saved = after, 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved += 1
        if self.saved == 3 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.saved == 3:
            self.states.clean = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_between_states_and_checkpoint_leaves_them_together(tmp_path, when):
    whole = fit(tmp_path / "whole", "Ditto", awake=2)
    arguments = [sys.executable, __file__, str(tmp_path / "killed"), when]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert torch.load(last(tmp_path / "killed"))["epoch"] == (1 if when == "before" else 2)
    assert files(tmp_path / "killed") > referred(last(tmp_path / "killed"))  # and some that nobody refers to
    resumed = fit(tmp_path / "killed", "Ditto", awake=2, resume=last(tmp_path / "killed"))
    assert_same_run(whole, resumed, tmp_path / "whole", tmp_path / "killed")
    assert files(tmp_path / "killed") == referred(last(tmp_path / "killed"))


@pytest.mark.slow
def test_files_stay_as_long_as_a_checkpoint_refers_to_them(tmp_path):
    class Keep(L.Callback):
        """Keeps the checkpoint of a round under another name, and writes one into another folder."""

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "run" / "checkpoints" / "kept.pt")
                trainer.save_checkpoint(tmp_path / "elsewhere" / "kept.ckpt")

    whole = fit(tmp_path / "whole")
    fit(tmp_path / "run", awake=2, callbacks=[Keep()])
    kept = tmp_path / "run" / "checkpoints" / "kept.pt"
    assert files(tmp_path / "run") == referred(kept) | referred(last(tmp_path / "run"))
    assert not referred(kept) <= referred(last(tmp_path / "run"))
    for path in (kept, tmp_path / "elsewhere" / "kept.ckpt"):
        resumed = fit(tmp_path / "again" / path.parent.parent.name, awake=2, resume=path)
        assert_equal(whole.ask(own_state), resumed.ask(own_state))
    gc.collect()
    # another process goes on from the last one, and knows of neither
    fit(tmp_path / "run", awake=2, rounds=ROUNDS + 2, resume=last(tmp_path / "run"))
    assert files(tmp_path / "run") == referred(kept) | referred(last(tmp_path / "run"))
    kept.unlink()
    gc.collect()
    fit(tmp_path / "run", awake=2, rounds=ROUNDS + 3, resume=last(tmp_path / "run"))
    assert files(tmp_path / "run") == referred(last(tmp_path / "run"))


@pytest.mark.seconds
def test_what_another_run_at_work_beside_the_same_checkpoints_has_not_saved_yet_stays(tmp_path):
    other = StateFiles(tmp_path / "run" / "checkpoints" / state_files.FOLDER)
    other.put(5, Content.of({"weight": torch.ones(2)}), trained=True)
    fit(tmp_path / "run", awake=2)
    assert other.read(5).state()["weight"].sum() == 2
    del other
    gc.collect()
    fit(tmp_path / "run", awake=2, rounds=ROUNDS + 1, resume=last(tmp_path / "run"))
    assert files(tmp_path / "run") == referred(last(tmp_path / "run"))


def test_runs_with_the_same_states_beside_the_same_checkpoints_do_not_delete_each_other_s(tmp_path):
    one, other = StateFiles(tmp_path), StateFiles(tmp_path)
    for files in (one, other):
        files.put(5, Content.of({"weight": torch.ones(2)}), trained=True)
    one.put(5, Content.of({"weight": torch.zeros(2)}), trained=True)
    assert other.read(5).state()["weight"].sum() == 2


@pytest.mark.seconds
def test_checkpoints_of_another_folder_have_their_files_there_and_no_others(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val/loss", save_top_k=2, every_n_epochs=1)
    fit(tmp_path / "run", awake=1, rounds=8, callbacks=[best])
    checkpoints = list((tmp_path / "best").glob("*.ckpt"))
    assert len(checkpoints) == 2
    there = {path.name for path in (tmp_path / "best" / state_files.FOLDER).rglob("*") if path.is_file()}
    assert there == set().union(*map(referred, checkpoints))
    fit(tmp_path / "again", awake=1, rounds=9, resume=checkpoints[0])
    assert files(tmp_path / "run") == referred(last(tmp_path / "run"))


@pytest.mark.seconds
@pytest.mark.parametrize("way", ["moved", "deleted", "changed"])
def test_a_checkpoint_without_its_files_is_refused(tmp_path, way):
    fit(tmp_path / "run", awake=2, rounds=2)
    path, folder = last(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "clients"
    one = next(folder.rglob("*.state"))
    if way == "moved":
        path = path.replace(tmp_path / "last.ckpt")
    elif way == "deleted":
        one.unlink()
    else:
        for state in folder.rglob("*.state"):
            state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="is damaged" if way == "changed" else "is not there") as error:
        fit(tmp_path / "run", awake=2, resume=path)
    assert "\n" not in str(error.value)


@pytest.mark.seconds
def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    fit(tmp_path / "run", "Ditto", awake=2, rounds=2)
    other = client(Ditto, backbone=GroupNet)
    with pytest.raises(ConfigError, match="^model: the checkpoint is of another network: client"):
        fit(tmp_path / "run", other, awake=2, resume=last(tmp_path / "run"))


@pytest.mark.seconds
def test_without_checkpoints_states_lie_in_a_folder_that_is_deleted(tmp_path):
    federation = run(client(FedAvg), digits(3), engine=Local(awake=1))
    folder = federation.engine.files.folder
    assert len(list(folder.rglob("*.state"))) == 3  # the latest of each
    tested = trainer().test(federation, datamodule=digits(3))
    everybody = Federation(client(FedAvg), seed=3, threads=1)
    fitting = trainer(2)
    fitting.fit(everybody, datamodule=digits(3))
    assert tested == trainer().test(everybody, datamodule=digits(3))
    del federation, tested
    gc.collect()
    assert not folder.exists()


@pytest.mark.seconds
def test_a_federation_that_was_validated_before_its_fit_leaves_no_files(tmp_path):
    federation = Federation(made("FedAvg"), seed=3, threads=1, participation=2, engine=Local(awake=1))
    trainer(1).validate(federation, datamodule=digits(4), verbose=False)
    fitting = trainer(6, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True)
    fitting.fit(federation, datamodule=digits(4))
    for folder in (federation.engine.files.folder, tmp_path / state_files.FOLDER):
        assert {path.name for path in folder.rglob("*.state")} == referred(tmp_path / "last.ckpt")


def test_nobody_is_made_before_it_is_needed():
    made = []

    class Counts(FedAvg):
        def configure_state(self):
            made.append(self)

    federation = Federation(client(Counts), seed=3, threads=1, participation=2, engine=Local(awake=2))
    trainer(1, limit_val_batches=0, limit_test_batches=0).fit(federation, datamodule=digits(20))
    # the example that makes the server, one whose Trainer is lent, one that stands for all like it, those that train
    assert len(made) == 5


def test_clients_that_begin_otherwise_than_said_are_refused():
    class Odd(FedAvg):
        def configure_state(self):
            with torch.no_grad():
                next(self.learner.parameters()).add_(vars(self.spec)["client_id"])  # past all watching

    federation = Federation(client(Odd), seed=3, threads=1, engine=Local(awake=2))
    with pytest.raises(ConfigError, match=r"^federation\.engine\.awake: client 1 begins with other tensors"):
        trainer(1).fit(federation, datamodule=digits(3))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "clients").write_text("")
    with pytest.raises(ConfigError, match=r"^federation\.engine\.awake: states of clients cannot be written") as error:
        fit(tmp_path / "run", awake=2)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_disk_that_fills_up_with_states_ends_the_run_and_it_is_gone_on_with(tmp_path, monkeypatch):
    whole, put, states = fit(tmp_path / "whole", "Ditto", awake=2), Path.replace, []

    def full(path, target):
        states.extend([target] if ".state" in path.name else [])
        if len(states) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(SaveError, match=r"^The state of client \d cannot be written: .*\(No space left") as error:
            fit(tmp_path / "run", "Ditto", awake=2)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "run").rglob("*.part"))
    resumed = fit(tmp_path / "run", "Ditto", awake=2, resume=last(tmp_path / "run"))
    assert_same_run(whole, resumed, tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("awake", [2.5, "2", 0, -1])
def test_a_number_of_clients_that_is_none_is_refused(awake):
    with pytest.raises(ConfigError, match=rf"^federation\.engine\.awake={awake!r}: give a whole number above 0\.$"):
        Local(awake=awake)


if __name__ == "__main__":
    fit(Path(sys.argv[1]), "Ditto", awake=2, plugins=[Kill(sys.argv[2] == "after")])


# ------------------------------------------------------------------------ without models as their clients trained them


AFTER = {"evaluate": "after", "keep_trained": False}


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("FedAvg", set()),
        ("FedPer", {"head.weight", "head.bias"}),
        ("frozen", {"head.weight", "head.bias"}),
        ("moving", {"head.weight", "head.bias", "body.0.weight"}),  # which has not stayed as it was made
    ],
)
def test_what_replies_replace_is_not_in_a_file(tmp_path, method, kept):
    everybody = fit(tmp_path / "all", method, evaluate="after")
    one = fit(tmp_path / "one", method, awake=1, **AFTER)
    assert one.rows == everybody.rows
    assert "trained" in {row.state for row in everybody.other_rows}
    assert "trained" not in {row.state for row in one.other_rows}
    assert_equal(one.coordinator.state_dict(), everybody.coordinator.state_dict())
    for path in (tmp_path / "one").rglob("*.state"):
        names = {name.removeprefix("learner.backbone.") for name in torch.load(path)["clients"]["state_dict"]}
        assert kept <= names <= kept | {f"body.1.{name}" for name in NORM_STATISTICS}


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, None), (None, 1)])
def test_such_a_run_is_resumed_with_and_without_sleep(tmp_path, before, after):
    whole = fit(tmp_path / "whole", evaluate="after")
    fit(tmp_path / "run", awake=before, rounds=2, **AFTER)
    resumed = fit(tmp_path / "run", awake=after, resume=last(tmp_path / "run"), **AFTER)
    assert resumed.rows == whole.rows
    assert_equal(resumed.coordinator.state_dict(), whole.coordinator.state_dict())
    alone = resumed.standalone(0).state_dict()
    assert_equal(alone, whole.standalone(0).state_dict())
    assert_equal(resumed.ask(own_state), resumed.ask(own_state, as_scored=True))


@pytest.mark.seconds
def test_models_as_trained_are_not_made_up(tmp_path):
    fit(tmp_path / "run", awake=1, rounds=2, **AFTER)
    with pytest.raises(ConfigError, match=r"^federation\.keep_trained: the checkpoint is of a run with False"):
        fit(tmp_path / "run", awake=1, resume=last(tmp_path / "run"), evaluate="after")
    fit(tmp_path / "kept", awake=1, rounds=2, evaluate="after")
    fit(tmp_path / "kept", awake=1, resume=last(tmp_path / "kept"), **AFTER)
    with pytest.raises(ConfigError, match=r"^federation\.evaluate=before scores models as they have trained"):
        Federation(made("FedAvg"), keep_trained=False)


def test_a_method_that_needs_what_was_not_kept_says_so(tmp_path):
    """After its first rounds PFedSim sends no heads any more."""
    with pytest.raises(ConfigError, match=r"^federation\.keep_trained=False: client \d needs its own 'learner.*head"):
        fit(tmp_path / "run", client(PFedSim, warmup_rounds=3), awake=1, rounds=8, **AFTER)
