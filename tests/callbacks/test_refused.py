"""Refused uploads are in a table, which is only there if there are any."""

from pathlib import Path

import pytest
import torch

from cli.typed import TINY, rows, typed
from lit_pfl import Federation
from lit_pfl.errors import UploadError
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import RefusedUploads, RunLogger
from lit_pfl_callbacks.rounds import run_folder
from tiny import client, digits, trainer


class Spoils(FedAvg):
    """Client 1 uploads infinity in every second round, from the second on; from round `fails` on all do."""

    fails = 10

    def upload(self):
        upload = super().upload()
        done = self.completed_rounds
        if self.spec is not None and (done + 1 >= self.fails or (self.spec.client_id == 1 and done % 2 == 1)):
            upload = {**upload, next(iter(upload)): torch.full_like(next(iter(upload.values())), torch.inf)}
        return upload


def fit(rounds: int, kind=Spoils, **options) -> Path:
    logger = RunLogger(".", name="", version="run")
    callbacks = [RefusedUploads()]
    fitting = trainer(rounds, logger=logger, callbacks=callbacks, enable_checkpointing=True)
    federation = Federation(client(kind), seed=3, threads=1, quorum=0.5)
    fitting.fit(federation, datamodule=digits(3), **options)
    return run_folder(fitting) / "refused.csv"


@pytest.mark.filterwarnings("ignore:.*continues without one upload")
def test_a_row_an_upload_with_round_client_tensor_and_reason():
    found = rows(fit(4))
    assert [(row["round"], row["client"]) for row in found] == [("2", "1"), ("4", "1")]
    assert all(row["tensor"] and f"tensor {row['tensor']!r} holds NaN" in row["reason"] for row in found)
    assert list(found[0]) == ["round", "client", "tensor", "reason"]


def test_without_any_there_is_no_file():
    assert not fit(1).exists()


@pytest.mark.filterwarnings("ignore:.*continues without one upload")
def test_a_round_that_ends_the_run_is_written_once():
    class AllFail(Spoils):
        fails = 3

    with pytest.raises(UploadError, match="fewer than the quorum"):
        fit(4, AllFail)
    found = rows(Path("run/refused.csv"))
    assert [(row["round"], row["client"]) for row in found] == [("2", "1"), *(("3", str(k)) for k in range(3))]


@pytest.mark.seconds
def test_every_run_of_the_command_line_has_it(capsys):
    assert typed(capsys, "fit", *TINY, "--folder", "run", "--trainer.max_epochs", "1").errors == []
    state = torch.load("run/checkpoints/last.ckpt")
    assert "RefusedUploads" in state["callbacks"]
    assert not Path("run/refused.csv").exists()
