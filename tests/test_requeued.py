"""A federation in a job of SLURM: requeued, it goes on with a whole round; and each task may run one."""

import os
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from cli.typed import TINY, rows
from lit_pfl import Federation
from lit_pfl.cli import main
from lit_pfl.methods import Ditto
from tiny import assert_equal, client, digits, trainer, weights

CALL = "lightning.pytorch.trainer.connectors.signal_connector.call"


@pytest.fixture
def job(monkeypatch):
    """The variables of a job, and what is asked of SLURM."""
    variables = {"JOB_ID": 1234, "JOB_NAME": "job.sh", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    asked = []
    monkeypatch.setattr(CALL, lambda command: asked.append(command) or 0)
    yield asked
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


class Signals(L.Callback):
    """SLURM's signal in the middle of a round, while one client trains."""

    def __init__(self, client: int) -> None:
        self.client = client

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (pl_module.spec.client_id, pl_module.completed_rounds, batch_idx) == (self.client, 1, 0):
            os.kill(os.getpid(), signal.SIGUSR1)


def fit(folder, rounds, **options):
    federation = Federation(client(Ditto), seed=3, threads=1, **options)
    trainer(rounds, default_root_dir=folder).fit(federation, datamodule=digits())
    return federation


@pytest.mark.seconds
@pytest.mark.parametrize("participation", [1.0, 2])
def test_it_is_the_run_that_was_not_requeued(job, tmp_path, participation):
    whole = fit(tmp_path / "whole", 4, participation=participation)
    client = whole.participants(1)[0]
    # the current folder is the job's, as it mostly is: its clients would find the checkpoint there, too
    fit(tmp_path, 3, participation=participation, client_trainer={"callbacks": [Signals(client)]})
    assert job == [["scontrol", "requeue", "1234"]]
    [saved] = tmp_path.glob("hpc_ckpt_*.ckpt")
    assert torch.load(saved, weights_only=False)["epoch"] == 1
    again = fit(tmp_path, 4, participation=participation)
    assert_equal(weights(again), weights(whole), "weights")
    assert again.rows == whole.rows
    assert again.traffic.total == whole.traffic.total


@pytest.fixture
def second_task(monkeypatch):
    """The second of the tasks that srun has started, of which Lightning would let the first one write and warn."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)


@pytest.mark.seconds
def test_each_task_that_runs_a_federation_writes_all_its_files(second_task, tmp_path):
    main(["fit", *TINY, "--folder", "mine", "--trainer.max_epochs", "2"])
    assert [row["round"] for row in rows(Path("mine/metrics.csv"))] == ["1", "2"]


def test_each_task_that_runs_a_federation_writes_to_any_logger(second_task, tmp_path):
    federation, logger = Federation(client(Ditto), seed=3, threads=1), CSVLogger(tmp_path, name="", version="")
    trainer(2, logger=logger).fit(federation, datamodule=digits())
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.seconds
def test_the_command_that_begins_and_continues_a_run_needs_no_other_checkpoint(job):
    Path("hpc_ckpt_1.ckpt").write_text("another job's")
    for rounds in ("1", "2"):
        main(["fit", *TINY, "--folder", "mine", "--ckpt_path", "last", "--trainer.max_epochs", rounds])
        assert [row["round"] for row in rows(Path("mine/metrics.csv"))] == ["1", "2"][: int(rounds)]
