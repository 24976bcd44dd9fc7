"""Stops, full disks and second processes: the last complete round is kept, and nothing of an incomplete one."""

import csv
import errno
import io
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from random import Random

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from cli.typed import TINY, rows, typed
from lit_pfl.cli.folders import alone_in
from lit_pfl.errors import SaveError
from lit_pfl.federation import Federation
from lit_pfl.lightning_internals import AtomicCheckpointIO, read_checkpoint
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import ClientsTable, RunLogger
from tiny import assert_equal, client, digits, run, trainer, weights

FOLDER = Path("runs/SimFed-Digits/version_0")
#: a callback that sends a signal to its own process at some moment of round 2
SIGNALS = """
import os
import lightning as L

class At(L.Callback):
    def __init__(self, hook: str, signum: int, epoch: int = 1):
        def send(trainer, *args):
            if trainer.current_epoch == epoch:
                os.kill(os.getpid(), signum)
        setattr(self, hook, send)
"""


def at(hook: str, signum: int, epoch: int = 1) -> list[str]:
    Path("stopped.py").write_text(SIGNALS)
    options = {"hook": hook, "signum": signum, "epoch": epoch}
    return ["--trainer.callbacks", "stopped.At", *(f"--trainer.callbacks.{k}={v}" for k, v in options.items())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of three rounds that nothing stopped."""
    from lit_pfl.cli import main

    folder = tmp_path_factory.mktemp("whole")
    main(["fit", *TINY, "--trainer.max_epochs", "3", "--trainer.logger.save_dir", str(folder)])
    return folder / "SimFed-Digits/version_0"


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hook", "signum", "rounds"),
    [
        ("on_train_batch_start", signal.SIGTERM, 1),
        ("on_train_batch_start", signal.SIGINT, 1),
        ("on_validation_batch_start", signal.SIGTERM, 1),
        ("on_validation_end", signal.SIGINT, 1),
        ("on_train_epoch_end", signal.SIGTERM, 2),
        ("on_train_epoch_end", signal.SIGINT, 2),
    ],
)
def test_a_signal_drops_the_round_that_is_not_complete_and_says_how_to_go_on(hook, signum, rounds, whole, capsys):
    came = typed(capsys, "fit", *TINY, "--trainer.max_epochs", "3", *at(hook, signum))
    assert came.code == 128 + signum
    assert [row["round"] for row in rows(FOLDER / "metrics.csv")] == [str(r + 1) for r in range(rounds)]
    assert {row["round"] for row in rows(FOLDER / "clients.csv")} == {str(r + 1) for r in range(rounds)}
    assert "test/acc" not in rows(FOLDER / "metrics.csv")[0], "nothing is scored"
    assert read_checkpoint(FOLDER / "checkpoints/last.ckpt")["federation"]["coordinator"]["round"] == rounds
    assert f"Stopped by {signal.Signals(signum).name}" in came.out

    command = came.out.rstrip().splitlines()[-1].split()
    assert command[0] == "lit-pfl"
    came = typed(capsys, *command[1:], "--trainer.callbacks", "null")
    assert came.code == 0
    for name in ("metrics.csv", "clients.csv"):
        assert (FOLDER / name).read_text() == (whole / name).read_text()


@pytest.mark.parametrize("ends", ["raise", "raise SystemExit(1) from None", "raise KeyboardInterrupt from None"])
def test_a_signal_while_a_client_trains_is_heard_at_once(ends, capsys):
    """Also where what was waiting ends otherwise for it, as Ray does."""
    Path("mine.py").write_text(
        "import os, signal\nfrom lit_pfl.methods import FedAvg\n"
        "class Mine(FedAvg):\n"
        "    def begin_epoch(self, epoch, local_epochs):\n"
        "        if self.trainer.current_epoch == 1 and self.spec.client_id == 1:\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT)\n"
        "            except SystemExit:\n"
        f"                {ends}\n"
    )
    sys.modules.pop("mine", None)
    came = typed(capsys, "fit", "--model", "mine.Mine", "--model.backbone", "MLP", "--data.num_clients", "3")
    assert came.code == 130
    assert "Stopped by SIGINT; a round that was not complete is dropped." in came.out
    assert len(rows(Path("runs/Mine-Digits/version_0/metrics.csv"))) == 1


def test_a_stop_before_the_first_round_is_complete_keeps_nothing(capsys):
    came = typed(capsys, "fit", *TINY, *at("on_train_batch_start", signal.SIGTERM, epoch=0))
    assert came.code == 143
    assert "before there was a checkpoint" in came.out
    assert sorted(file.name for file in FOLDER.iterdir()) == ["config.yaml", "partition.csv"]


@pytest.mark.slow
def test_a_process_that_is_terminated_exits_with_143_and_keeps_another_one_out(capsys):
    words = ["fit", *TINY, "--trainer.max_epochs", "10000"]
    start = f"from lit_pfl.cli import main; main({words!r})"
    first = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    checkpoint = FOLDER / "checkpoints/last.ckpt"
    while not checkpoint.exists():
        assert first.poll() is None
        time.sleep(0.1)
    came = typed(capsys, "fit", "--config", str(FOLDER / "config.yaml"), "--ckpt_path", str(checkpoint))
    assert came.code == 2
    assert f"Another process is at work in {FOLDER}" in came.errors[0]
    first.terminate()
    out, _ = first.communicate()
    assert first.returncode == 143
    done = len(rows(FOLDER / "metrics.csv"))
    assert read_checkpoint(checkpoint)["federation"]["coordinator"]["round"] == done
    assert f"--ckpt_path {checkpoint}" in out.splitlines()[-1]
    with alone_in(FOLDER, made=False):
        pass


class AskToStop(L.Callback):
    """Asks for a stop after the first client of round 2, as a time limit or an early stop may."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 0):
            trainer.should_stop = True


@pytest.mark.seconds
def test_a_stop_inside_a_round_comes_at_its_end(tmp_path):
    logger = RunLogger(str(tmp_path), name="", version="run")
    federation = Federation(client(FedAvg), seed=3, threads=1)
    callbacks = [AskToStop(), ClientsTable(show=False)]
    trainer(5, callbacks=callbacks, logger=logger).fit(federation, datamodule=digits())
    two = run(client(FedAvg), rounds=2)
    assert federation.coordinator.round == 2
    assert_equal(weights(federation), weights(two))
    assert [row["round"] for row in rows(tmp_path / "run/metrics.csv")] == ["1", "2"]
    assert federation.rows == two.rows


def test_a_time_limit_lets_a_round_end():
    federation = Federation(client(FedAvg), seed=3, threads=1)
    trainer(5, max_time=timedelta(milliseconds=1)).fit(federation, datamodule=digits())
    assert federation.coordinator.round == 1
    assert_equal(weights(federation), weights(run(client(FedAvg), rounds=1)))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_leaves_the_former_checkpoint(small_disk):
    io, path = AtomicCheckpointIO(), small_disk / "last.ckpt"
    io.save_checkpoint({"a": torch.zeros(10_000)}, path)
    with pytest.raises(SaveError, match=r"The checkpoint .*last.ckpt cannot be written \(.*No space left"):
        io.save_checkpoint({"a": torch.zeros(100_000)}, path)
    assert torch.equal(torch.load(path)["a"], torch.zeros(10_000))
    assert [file.name for file in small_disk.iterdir()] == ["last.ckpt"]
    with pytest.warns(UserWarning, match="The run continues without"):
        AtomicCheckpointIO("continue").save_checkpoint({"a": torch.zeros(100_000)}, path)
    assert [file.name for file in small_disk.iterdir()] == ["last.ckpt"]


@pytest.mark.seconds
@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_run_on_a_full_disk_stops_in_one_line_or_goes_on(choice, small_disk, capsys):
    where = ["--trainer.logger.save_dir", str(small_disk)]
    full = ["--trainer.callbacks", "filling.Fill"]
    Path("filling.py").write_text(
        "import lightning as L\nfrom pathlib import Path\n"
        "class Fill(L.Callback):\n"
        "    def on_train_epoch_start(self, trainer, *args):\n"
        "        if trainer.current_epoch == 1:\n"
        f"            Path({str(small_disk)!r}, 'else').write_bytes(bytes(4096 * 10))\n"
    )
    came = typed(capsys, "fit", *TINY, *where, *full, "--trainer.max_epochs", "3", "--federation.if_not_saved", choice)
    folder = small_disk / "SimFed-Digits/version_0"
    assert read_checkpoint(folder / "checkpoints/last.ckpt")["federation"]["coordinator"]["round"] == 1
    assert not list(small_disk.rglob("*.part"))
    if choice == "stop":
        assert came.code == 2
        assert "cannot be written" in came.errors[0]
    else:
        assert came.code == 0
        assert len(rows(folder / "metrics.csv")) == 3


class Disk:
    """Counts what is written to files that are to be whole, and refuses all from some write on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.room, self.error = 0, float("inf"), errno.ENOSPC
        sync, begin, append = os.fsync, csv.DictWriter.__init__, csv.DictWriter.writerows

        def fsync(file):
            self.write()
            return sync(file)

        def init(writer, file, *args, **kwargs):
            begin(writer, file, *args, **kwargs)
            writer.on_disk = not isinstance(file, io.StringIO)

        def writerows(writer, rows):
            append(writer, rows)
            if writer.on_disk:
                self.write()

        monkeypatch.setattr(csv.DictWriter, "__init__", init)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(csv.DictWriter, "writerows", writerows)

    def write(self) -> None:
        self.writes += 1
        if self.writes > self.room:
            raise OSError(self.error, os.strerror(self.error))


#: of all writes of a run, after which share none succeeds any more
SHARES = [pytest.param(i / 40, marks=pytest.mark.full if i % 5 else pytest.mark.slow) for i in range(40)]


@pytest.mark.parametrize("share", SHARES)
def test_a_disk_that_fills_up_at_any_write_damages_nothing_and_the_run_is_gone_on_with(share, monkeypatch, capsys):
    keeps = ["--trainer.callbacks", "lit_pfl.lightning_internals.LastCheckpoint", "--trainer.callbacks.keep", "2"]
    words = ["fit", *TINY, *keeps, "--trainer.max_epochs", "2", "--folder"]
    disk = Disk(monkeypatch)
    assert typed(capsys, *words, "whole").errors == []
    disk.writes, disk.room = 0, int(share * disk.writes)
    disk.error = errno.EACCES if int(share * 100) % 2 else errno.ENOSPC  # or somebody has taken the right to write
    came = typed(capsys, *words, "cut")
    assert (came.code, len(came.errors)) == (2, 1), came
    assert "cannot be written" in came.errors[0] or "No space left" in came.errors[0]
    for path in Path("cut").rglob("*"):
        assert path.suffix != ".part"
        if path.suffix == ".ckpt":
            read_checkpoint(path)
        if path.suffix == ".csv":
            assert None not in [value for row in rows(path) for value in row.values()], path
    disk.room = float("inf")
    checkpoint = Path("cut/checkpoints/last.ckpt")
    resumed = ["--ckpt_path", str(checkpoint)] if checkpoint.exists() else []
    assert typed(capsys, *words, "cut", *resumed).errors == []
    for name in ("metrics.csv", "clients.csv", "communication.csv", "similarity.csv"):
        assert Path("cut", name).read_bytes() == Path("whole", name).read_bytes(), name
    states = [read_checkpoint(Path(run, "checkpoints/last.ckpt"))["federation"] for run in ("whole", "cut")]
    assert_equal(*states)


@pytest.mark.seconds
def test_a_clock_that_jumps_changes_nothing_of_a_run(whole, monkeypatch, capsys):
    jumps = Random(0)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(-1e9, 4e9))
    assert typed(capsys, "fit", *TINY, "--trainer.max_epochs", "3").errors == []
    for name in ("metrics.csv", "clients.csv"):
        assert (FOLDER / name).read_text() == (whole / name).read_text()
    assert all(0 <= float(row["seconds"]) < 60 for row in rows(FOLDER / "times.csv"))


def test_a_run_that_never_began_leaves_no_folder(capsys):
    came = typed(capsys, "fit", *TINY, "--federation.participation", "50")
    assert came.code == 2
    assert not FOLDER.exists()


def test_two_that_begin_at_once_get_a_folder_each(tmp_path):
    one, other = (RunLogger(str(tmp_path), name="a") for _ in range(2))
    assert one.log_dir == other.log_dir
    assert [one.make_folder().name, other.make_folder().name] == ["version_0", "version_1"]
    with pytest.raises(FileExistsError):
        RunLogger(str(tmp_path), name="a", version=0).make_folder()


def test_a_stop_while_the_trainer_ends_is_a_stop(monkeypatch, capsys):
    teardown, reset, ending = L.Trainer._teardown, CombinedLoader.reset, []

    def stopped_once(loader):
        reset(loader)
        if ending and ending.pop():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(L.Trainer, "_teardown", lambda trainer: (ending.append(True), teardown(trainer)))
    monkeypatch.setattr(CombinedLoader, "reset", stopped_once)
    came = typed(capsys, "fit", *TINY, "--trainer.max_epochs", "1")
    assert came.code == 143
    assert "Stopped by SIGTERM" in came.out
