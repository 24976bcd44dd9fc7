"""A run that is killed and resumed is the run that never was."""

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections import UserList
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.core import ServerMomentum
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import AtomicCheckpointIO, LastCheckpoint
from lit_pfl.methods import APFL, Ditto, FactorizedFL, FedAvg, SimFed, StandAlone
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks import (
    ClientsTable,
    CommunicationLedger,
    EmbeddingMap,
    RoundTimer,
    RunLogger,
    Similarity,
    SparsityMonitor,
)
from tiny import assert_equal, client, digits, trainer

METHODS = {"SimFed": SimFed, "FedAvg": FedAvg, "StandAlone": StandAlone}
ROUNDS = 5


class Kill(L.Callback):
    """Kills the process when a client of a round is about to train, or at the end of it."""

    def __init__(self, round: int, batch: int | None) -> None:
        self.round, self.batch = round, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch + 1, batch_idx) == (self.round, self.batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer, pl_module):
        if self.batch is None:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, method: str, kill: tuple[int, int | None] | None = None, resume: bool = False) -> Federation:
    logger = RunLogger(str(folder.parent), name="", version=folder.name)
    often = [kind(every_n_rounds=2) for kind in (Similarity, SparsityMonitor, EmbeddingMap)]
    watching = [CommunicationLedger(per_client=True), RoundTimer(), ClientsTable(show=False), *often]
    callbacks = [*watching, LastCheckpoint(), *([Kill(*kill)] if kill else [])]
    federation = Federation(client(METHODS[method]), seed=3, threads=1, local_epochs=2, participation=0.5)
    path = folder / "checkpoints" / "last.ckpt" if resume else None
    fitting = trainer(ROUNDS, logger=logger, callbacks=callbacks, enable_checkpointing=True)
    fitting.fit(federation, datamodule=digits(6, batch_size=32), ckpt_path=path)
    return federation


def phases(times: str) -> list[str]:
    """Return the rounds and phases of a table of times, which are never the same twice."""
    return [line.rpartition(",")[0] for line in times.splitlines()]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("method", "kill"),
    [
        pytest.param("SimFed", (4, 1), id="mid-round"),
        pytest.param("FedAvg", (2, 2), id="early", marks=pytest.mark.full),
        pytest.param("StandAlone", (5, 0), id="at the start of a round", marks=pytest.mark.full),
        pytest.param("SimFed", (ROUNDS, None), id="after the last round", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_never_killed(tmp_path, method, kill):
    whole = fit(tmp_path / "whole", method)
    arguments = [str(tmp_path / "killed"), method, *map(str, kill)]
    killed = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert killed.returncode == -signal.SIGKILL
    resumed = fit(tmp_path / "killed", method, resume=True)

    last = [torch.load(tmp_path / run / "checkpoints/last.ckpt") for run in ("whole", "killed")]
    for state in last:  # the paths of the two runs differ, and wall-clock times
        del state["callbacks"]
    assert_equal(last[0], last[1])
    assert_equal(whole.coordinator.state_dict(), resumed.coordinator.state_dict())
    assert whole.rows == resumed.rows
    tables = {path.name: path.read_text() for path in (tmp_path / "whole").glob("*.csv")}
    assert {"metrics.csv", "clients.csv", "similarity.csv", "sparsity.csv"} <= tables.keys()
    assert ("communication.csv" in tables) == (method != "StandAlone")
    assert ("embeddings.csv" in tables) == ("matching.csv" in tables) == (method == "SimFed")
    times = tables.pop("times.csv")
    assert phases(times) == phases((tmp_path / "killed" / "times.csv").read_text())
    for name, table in tables.items():
        assert table == (tmp_path / "killed" / name).read_text(), name
    assert len((tmp_path / "whole" / "metrics.csv").read_text().splitlines()) == ROUNDS + 1
    momentum = whole.engine._restored[whole.participants(0)[0]]["optimizer_states"][0]["state"][0]["momentum_buffer"]
    assert momentum.abs().sum() > 0


@pytest.mark.seconds
def test_a_checkpoint_holds_nothing_but_tensors_and_plain_values(tmp_path):
    fit(tmp_path / "run", "SimFed")
    torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)


@pytest.mark.seconds
def test_a_checkpoint_of_other_clients_is_refused(tmp_path):
    fit(tmp_path / "run", "FedAvg")
    with pytest.raises(ConfigError, match="holds 6 clients and the data has 4"):
        trainer().test(
            Federation(client(FedAvg)), datamodule=digits(4), ckpt_path=tmp_path / "run/checkpoints/last.ckpt"
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local": "head"}, "model.local: the checkpoint is of a run with None, not head"),
        ({"shares": "body"}, "model.shares: the checkpoint is of a run with None, not body"),
        ({"norm_stats": "averaged"}, "model.norm_stats: the checkpoint is of a run with local, not averaged"),
        ({"server_optimizer": ServerMomentum()}, "model.server_optimizer: .* a run with None, not ServerMomentum"),
        ({"optimizer": torch.optim.Adam}, "model.optimizer: the checkpoint is of a run with SGD, not Adam"),
        ({"scheduler": None}, "model.scheduler: the checkpoint is of a run with StepLR, not none"),
    ],
)
def test_what_clients_and_server_send_and_step_by_stays_the_same(tmp_path, options, said):
    fitting = trainer(1)
    fitting.fit(Federation(client(FedAvg), seed=1, threads=1), datamodule=digits(3))
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ConfigError, match=said):
        trainer(2).fit(
            Federation(client(FedAvg, **options), seed=1, threads=1),
            datamodule=digits(3),
            ckpt_path=tmp_path / "one.ckpt",
        )


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("method", "before", "now", "said"),
    [
        (SimFed, {"tau": 0.5}, {"tau": 0.25}, r"tau=0\.5, not 0\.25"),
        (FactorizedFL, {"match": "worst"}, {}, r"rule\.match=worst, not best"),
        (FedAvg, {"server_optimizer": ServerMomentum(0.5)}, {"server_optimizer": ServerMomentum(1)}, "r.lr=0.5, not 1"),
        (FedAvg, {"factorization": Factorization(l1=0.1)}, {"factorization": Factorization()}, r"n\.l1=0\.1, not"),
    ],
)
def test_options_of_the_method_stay_the_same_but_for_scoring(tmp_path, method, before, now, said):
    fitting = trainer(1)
    fitting.fit(Federation(client(method, **before), seed=1, threads=1), datamodule=digits(3))
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    other, scored = (Federation(client(method, **now), seed=1, threads=1) for _ in range(2))
    with pytest.raises(ConfigError, match=rf"^model: the checkpoint is of a run with .*{said}"):
        trainer(2).fit(other, datamodule=digits(3), ckpt_path=tmp_path / "one.ckpt")
    trainer().test(scored, datamodule=digits(3), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert scored.rows


@pytest.mark.seconds
def test_clients_keep_the_learning_rate_of_the_checkpoint_and_say_so_once(tmp_path):
    def made(rate):
        return client(FedAvg, scheduler=None, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))

    path, said = tmp_path / "one.ckpt", []
    for rounds, rate in enumerate((0.1, 0.01, 0.1), start=1):
        fitting = trainer(rounds)
        federation = Federation(made(rate), seed=1, threads=1)
        with warnings.catch_warnings(record=True) as caught:
            fitting.fit(federation, datamodule=digits(3), ckpt_path=path if path.exists() else None)
        said.append([str(one.message) for one in caught if "optimizer.lr=0.1 (not 0.01)" in str(one.message)])
        fitting.save_checkpoint(path)
    assert [len(lines) for lines in said] == [0, 1, 0]


def test_test_of_a_checkpoint_gives_the_last_round_s_scores(tmp_path):
    federation = fit(tmp_path / "run", "SimFed")
    restored = Federation(client(SimFed), participation=0.5)
    trainer().test(restored, datamodule=digits(6), ckpt_path=tmp_path / "run/checkpoints/last.ckpt", verbose=False)
    assert restored.rows == federation.rows


def test_a_checkpoint_is_written_beside_its_place_and_renamed(tmp_path, monkeypatch):
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"a": 1}, path)

    def crash(checkpoint, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        io.save_checkpoint({"a": 2}, path)
    assert torch.load(path) == {"a": 1}


def test_some_checkpoints_are_kept_and_a_kill_at_any_step_leaves_the_last_one(tmp_path, monkeypatch):
    """Every step of turning them over is cut off once, by an error in its place, and then done anew."""

    def save(number: int) -> None:
        fitting.checkpoint = number
        saving._save_checkpoint(fitting, str(tmp_path / "last.ckpt"))

    class Fitting:
        is_global_zero, global_step, loggers = True, 0, []

        def save_checkpoint(self, path, weights_only):
            step("save")
            AtomicCheckpointIO().save_checkpoint({"round": self.checkpoint}, path)

    def step(name: str) -> None:
        steps.append(name)
        if len(steps) == dies_at:
            raise KeyboardInterrupt

    def watched(name):
        own = getattr(Path, name)

        def wrapped(*args, **kwargs):
            step(name)
            return own(*args, **kwargs)

        return wrapped

    def rounds() -> list[int]:
        return [torch.load(path)["round"] for path in sorted(tmp_path.glob("last-*.ckpt"))][::-1]

    fitting, saving = Fitting(), LastCheckpoint(tmp_path, keep=3)
    steps: list[str] = []
    dies_at = 0
    for number in (1, 2, 3, 4):
        save(number)
    assert rounds() == [2, 3]
    for name in ("replace", "hardlink_to", "unlink"):
        monkeypatch.setattr(Path, name, watched(name))
    number = 4
    for dies_at in range(1, 12):  # noqa: B007 - it is read in step
        steps.clear()
        with contextlib.suppress(KeyboardInterrupt):
            save(number + 1)
        kept = torch.load(tmp_path / "last.ckpt")["round"]
        assert kept in (number, number + 1)
        assert all(round <= kept for round in rounds())
        number = kept
    assert len(steps) < dies_at, "every step was cut off"
    dies_at = 0
    for _ in range(3):
        save(number := number + 1)
    assert rounds() == [number - 2, number - 1]
    assert len(list(tmp_path.iterdir())) == 3


def test_checkpoints_are_kept_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    saving = LastCheckpoint(tmp_path / "kept", keep=2)
    fitting = trainer(3, callbacks=[saving], enable_checkpointing=True)
    fitting.fit(Federation(client(FedAvg), seed=3, threads=1), datamodule=digits(3))
    paths = [tmp_path / "kept" / name for name in ("last-1.ckpt", "last.ckpt")]
    assert sorted((tmp_path / "kept").iterdir()) == paths
    assert [torch.load(path)["federation"]["coordinator"]["round"] for path in paths] == [2, 3]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_a_number_of_checkpoints_that_is_none_is_refused(keep):
    with pytest.raises(ConfigError, match="LastCheckpoint: keep=.*give a whole number of 1 or more"):
        LastCheckpoint(keep=keep)


if __name__ == "__main__":
    fit(Path(sys.argv[1]), sys.argv[2], kill=(int(sys.argv[3]), None if sys.argv[4] == "None" else int(sys.argv[4])))


class StopsInTheMiddle(L.Callback):
    """Ends a fit between two clients of a round."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (2, 1):
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_a_checkpoint_of_the_middle_of_a_round_is_refused(tmp_path, monkeypatch, error):
    monkeypatch.setattr("lit_pfl.data.federated.LISTS", 2)
    saves = OnExceptionCheckpoint(tmp_path)
    made = Federation(client(FedAvg), seed=1, threads=1)
    with pytest.warns(UserWarning, match="in the middle of round 3"), pytest.raises((type(error), SystemExit)):
        trainer(4, callbacks=[saves, StopsInTheMiddle(error)], enable_checkpointing=True).fit(
            made, datamodule=digits(4)
        )
    again = Federation(client(FedAvg), seed=1, threads=1)
    with pytest.raises(ConfigError, match=r"written in the middle of round 3, .*such as checkpoints/last\.ckpt\.$"):
        trainer(4).fit(again, datamodule=digits(4), ckpt_path=saves.ckpt_path)


class Offset(L.LightningModule):
    """A module that keeps something in a checkpoint that is in none of its tensors."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 1)
        self.offset = 0.0

    def training_step(self, batch, batch_idx):
        return self.head(batch[0]).square().mean()

    def on_train_epoch_end(self):
        self.offset += 1.0

    def test_step(self, batch, batch_idx):
        self.log("level", self.head(batch[0]).mean() + self.offset)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["offset"] = self.offset

    def on_load_checkpoint(self, checkpoint):
        self.offset = checkpoint["offset"]


@pytest.mark.parametrize("method", [FedAvg, Ditto, APFL])
def test_what_a_module_adds_to_checkpoints_is_there_when_one_is_scored(tmp_path, method):
    def data():
        rows = [TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(k))) for k in (1, 2)]
        return PerClient([L.LightningDataModule.from_datasets(each, test_dataset=each, batch_size=4) for each in rows])

    def made():
        torch.manual_seed(0)
        return Federation(method(learner=Offset()), seed=1, threads=1)

    whole, saves = made(), trainer(2)
    saves.fit(whole, datamodule=data())
    saves.save_checkpoint(tmp_path / "two.ckpt")
    scored, resumed = made(), made()
    (scores,) = trainer(2).test(scored, data(), ckpt_path=tmp_path / "two.ckpt", verbose=False)
    assert scores["test/level"] == saves.callback_metrics["test/level"]
    for module in scored.clients.values():
        assert [learner.offset for learner in module.learners.values()] == [2.0] * len(module.learners)
    trainer(4).fit(resumed, datamodule=data(), ckpt_path=tmp_path / "two.ckpt")
    for module in resumed.clients.values():
        assert [learner.offset for learner in module.learners.values()] == [4.0] * len(module.learners)


class WithOptions(L.LightningDataModule):
    """Saves an option that is no plain value, as a list of Hydra is none."""

    def __init__(self, split):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(torch.arange(24.0).reshape(-1, 3).split(self.hparams.split[0])[0], 4)


def test_a_data_module_s_options_are_no_state_of_a_client(tmp_path):
    def data():
        return PerClient([WithOptions(UserList([4, 4]))])

    saves = trainer(1)
    saves.fit(Federation(FedAvg(learner=Offset()), seed=1, threads=1), datamodule=data())
    saves.save_checkpoint(tmp_path / "one.ckpt")
    resumed = Federation(FedAvg(learner=Offset()), seed=1, threads=1)
    trainer(2).fit(resumed, datamodule=data(), ckpt_path=tmp_path / "one.ckpt")
    assert resumed.clients[0].learner.offset == 2.0
