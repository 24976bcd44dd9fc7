"""A resume is of the same run, or refused in one line with the run folder as it was."""

import fcntl
import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import yaml

from cli.typed import TINY, contents, rows, typed
from lit_pfl.cli import main
from lit_pfl.cli.record import taken
from lit_pfl.errors import ConfigError
from lit_pfl.federation import Federation
from lit_pfl.learners import ImageClassifier
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, SimFed
from lit_pfl_callbacks import RunLogger
from tiny import assert_equal, client, digits, trainer


class Runs(NamedTuple):
    """A run of one round, and one of two that was never interrupted."""

    one: Path
    two: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    for rounds in (1, 2):
        where = ["--trainer.logger.save_dir", str(folder), "--trainer.logger.name", str(rounds)]
        main(["fit", *TINY, *where, "--trainer.max_epochs", str(rounds)])
    return Runs(folder / "1/version_0", folder / "2/version_0")


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A copy of the run of one round."""
    return Path(shutil.copytree(runs.one, tmp_path / "run"))


def resume(folder: Path, *words: str) -> list[str]:
    """Return what to type to go on with a run for a second round."""
    config, checkpoint = str(folder / "config.yaml"), str(folder / "checkpoints/last.ckpt")
    return ["fit", "--config", config, "--ckpt_path", checkpoint, "--trainer.max_epochs", "2", *words]


def made(folder: str) -> Path:
    Path(folder).mkdir(exist_ok=True)
    return Path(folder)


def state(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "checkpoints/last.ckpt")
    return {key: checkpoint["federation"][key] for key in ("coordinator", "clients", "streams")}


def refused(capsys, folder: Path, words: list[str], named: str) -> None:
    before = contents(folder)
    came = typed(capsys, *words)
    assert came.code == 2
    [error] = came.errors
    assert error.startswith(f"lit-pfl: error: {named}"), error
    assert contents(folder) == before


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        "--model FedAvg",
        "--model.tau 0.3",
        "--model.alpha 2",
        "--model.match random",
        "--model.optimizer Adam",
        "--model.optimizer SGD --model.optimizer.lr 0.2",
        "--model.scheduler StepLR --model.scheduler.step_size 1",
        "--model.backbone MLP",
        "--model.backbone.width 3",
        "--model.factorization null",
        "--model.factorization.rank 2",
        "--model.factorization.form FFxIO",
        "--model.factorization.l1 0.1",
        "--model.norm_stats averaged",
        "--model.reset_optimizer true",
        "--model.channels_last true",
        "--data MNIST",
        "--data.num_clients 4",
        "--data.partition Dirichlet",
        "--data.permute_labels false",
        "--data.seed 5",
        "--data.batch_size 64",
        "--data.evaluate_on all",
        "--data.train_fraction 0.7",
        "--data.test_fraction 0.15",
        "--data.augment CropFlip",
        "--data.image_size 8",
        "--seed_everything 5",
        "--federation.seed 5",
        "--federation.local_epochs 2",
        "--federation.participation 0.5",
        "--federation.evaluate after",
        "--federation.client_trainer.accumulate_grad_batches 2",
        "--trainer.precision 64-true",
        "--trainer.limit_train_batches 2",
        "--trainer.overfit_batches 2",
    ],
)
def test_a_resume_as_another_run_is_refused_by_the_option_that_differs(words, runs, run, capsys):
    named = next(word for word in words.split() if word.startswith("--"))[2:]
    refused(capsys, run, resume(run, *words.split()), named)
    assert not (runs.one.parent / "version_1").exists()


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        "--trainer.callbacks lit_pfl_callbacks.Similarity",
        "--trainer.enable_progress_bar false",
        "--trainer.check_val_every_n_epoch 1",
        "--trainer.default_root_dir elsewhere",
        "--trainer.num_sanity_val_steps 1",
        "--federation.threads 1",
        "--federation.quorum 1",
        "--federation.if_not_saved continue",
        "--data.eval_batch_size 100",
        "--trainer.logger+ CSVLogger --trainer.logger.save_dir more",
    ],
)
def test_a_resume_that_only_computes_or_shows_otherwise_goes_on_and_is_recorded(words, runs, run, capsys):
    before = contents(run)
    came = typed(capsys, *resume(run, *words.split()))
    assert (came.code, came.errors) == (0, [])
    assert_equal(state(run), state(runs.two))
    first, last = rows(run / "metrics.csv")[-1], rows(runs.two / "metrics.csv")[-1]
    for name in ("round", "train/loss", "val/acc", "test/acc", "comm/total_bytes"):
        assert first[name] == last[name]
    assert (run / "config.yaml").read_bytes() == before["config.yaml"]
    recorded = (run / "config.resumed_1.yaml").read_text()
    assert "# resumed after round 1" not in before["config.yaml"].decode()
    assert recorded.splitlines()[1] == "# resumed after round 1"
    assert "# trainer.max_epochs: 1 -> 2" in recorded
    assert yaml.safe_load(recorded)["trainer"]["max_epochs"] == 2
    assert "ckpt_path" not in yaml.safe_load(recorded)


class Code:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch run_by_pickle",)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(share * len(whole))]


def flipped(seed: int) -> Callable[[bytes], bytes]:
    def damage(whole: bytes) -> bytes:
        place = random.Random(seed).randrange(len(whole))
        return whole[:place] + bytes([whole[place] ^ 0b100]) + whole[place + 1 :]

    return damage


def edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def damage(whole: bytes) -> bytes:
        checkpoint = torch.load(io.BytesIO(whole))
        edit(checkpoint)
        return saved(checkpoint)

    return damage


def without(*path: str | int) -> Callable[[bytes], bytes]:
    def remove(checkpoint: dict[str, Any]) -> None:
        for key in path[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[path[-1]]

    return edited(remove)


def a_zip_of_text(whole: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", "text")
    return file.getvalue()


def another_shape(checkpoint: dict[str, Any]) -> None:
    tensors = checkpoint["federation"]["clients"][1]["state_dict"]
    name = next(name for name in tensors if tensors[name].dim() == 4)
    tensors[name] = tensors[name][:1]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "random": lambda whole: random.Random(0).randbytes(len(whole)),
    "text": lambda whole: b"model: FedAvg\n",
    "a zip of text": a_zip_of_text,
    "zeros": lambda whole: bytes(len(whole)),
    "doubled": lambda whole: whole[: len(whole) // 2] * 2,
    **{f"cut at {share}": cut(share) for share in (0.001, 0.1, 0.5, 0.9, 0.999)},
    **{f"a bit flipped, {seed}": flipped(seed) for seed in range(6)},
    "a pickle": lambda whole: pickle.dumps({"federation": {}}),
    "an old format": lambda whole: saved(torch.load(io.BytesIO(whole)), _use_new_zipfile_serialization=False),
    "code": lambda whole: saved({"federation": Code()}),
    "a tensor": lambda whole: saved(torch.zeros(3)),
    "another model's": lambda whole: saved({"state_dict": {}, "loops": {}, "epoch": 3, "global_step": 3}),
    "an empty federation": lambda whole: saved({"federation": {}, "state_dict": {}}),
    "no loops": without("loops"),
    "no optimizer": without("optimizer_states"),
    "no coordinator": without("federation", "coordinator"),
    "no server": without("federation", "coordinator", "server"),
    "no method": without("federation", "method"),
    "no client": without("federation", "clients", 1),
    "no trainer of a client": without("federation", "clients", 1, "optimizer_states"),
    "no stream of a client": without("federation", "streams", 1),
    "another shape": edited(another_shape),
    "clients of no kind": edited(lambda checkpoint: checkpoint["federation"].update(clients=3)),
    "other data": edited(lambda checkpoint: checkpoint["federation"]["data"].update({2: "0"})),
    "options of no kind": edited(lambda checkpoint: checkpoint["callbacks"].update(RunRecord=3)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_or_the_run_goes_on_rightly(damage, runs, run, capsys):
    path = run / "checkpoints/last.ckpt"
    path.write_bytes(damage(path.read_bytes()))
    before = contents(run)
    came = typed(capsys, *resume(run))
    if came.code == 0:  # damaged where it makes no difference
        assert_equal(state(run), state(runs.two))
        return
    assert came.code == 2
    assert len(came.errors) == 1
    assert contents(run) == before
    assert not Path("run_by_pickle").exists()


@pytest.mark.seconds
def test_what_a_refusal_says(run, capsys):
    checkpoint = run / "checkpoints/last.ckpt"
    whole = checkpoint.read_bytes()
    for damage, said in {
        "empty": "is not a whole checkpoint: ",
        "a bit flipped, 0": "is damaged: the checksum of ",
        "a tensor": "is not a federation's checkpoint.",
    }.items():
        checkpoint.write_bytes(DAMAGE[damage](whole))
        assert said in typed(capsys, *resume(run)).errors[0]
    checkpoint.write_bytes(DAMAGE["other data"](whole))
    assert "data: client 2 had other samples" in typed(capsys, *resume(run)).errors[0]
    for path in (run, run / "no.ckpt"):
        came = typed(capsys, "fit", *TINY, "--ckpt_path", str(path))
        assert came.errors[0].startswith(f"lit-pfl: error: Checkpoint file not found: {path} is ")
    came = typed(capsys, "fit", *TINY, "--ckpt_path", "best")
    assert came.errors[0].endswith("best is not there; of a federation name the file, in RUN/checkpoints.")


def test_what_a_learner_of_one_s_own_does_wrong_is_not_said_of_the_checkpoint(run, monkeypatch):
    def configure_model(self):
        raise RuntimeError("two layers do not fit")

    monkeypatch.setattr(ImageClassifier, "configure_model", configure_model)
    with pytest.raises(RuntimeError, match="two layers do not fit"):
        main(resume(run))


@pytest.mark.seconds
def test_a_config_of_a_run_begins_a_run_of_its_own(run, capsys):
    typed(capsys, *resume(run))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert "ckpt_path" not in config
    assert config["trainer"]["logger"]["init_args"]["version"] is None
    before = contents(run)
    came = typed(capsys, "fit", "--config", str(run / "config.resumed_1.yaml"), "--seed_everything", "5")
    assert came.code == 0
    assert contents(run) == before
    assert (run.parent / "1/version_0").exists() or "version_1" in came.out


@pytest.mark.slow
def test_a_run_is_resumed_again_and_again(run, capsys):
    for rounds in (2, 3):
        typed(capsys, *resume(run, "--trainer.max_epochs", str(rounds)))
    assert [row["round"] for row in rows(run / "metrics.csv")] == ["1", "2", "3"]
    tested = [[row["round"] for row in rows(run / name) if row.get("split") == "test" or row.get("test/acc")]
              for name in ("metrics.csv", "clients.csv")]  # fmt: skip
    three_clients = ["1"] * 6 + ["2"] * 6 + ["3"] * 6  # in both states
    assert tested == [["1", "2", "3"], three_clients], "each with the round that it ended with"
    notes = [(run / f"config.resumed_{i}.yaml").read_text().splitlines()[1:3] for i in (1, 2)]
    assert notes == [
        ["# resumed after round 1", "# trainer.max_epochs: 1 -> 2"],
        ["# resumed after round 2", "# trainer.max_epochs: 2 -> 3"],
    ]
    came = typed(capsys, *resume(run, "--trainer.max_epochs", "3"))
    assert came.code == 0
    assert not (run / "config.resumed_3.yaml").exists(), "nothing ran, so nothing is recorded"
    assert "config.resumed_2.yaml" in came.out, "the next command builds on the latest options"


def test_one_command_begins_a_run_and_goes_on_with_it(capsys):
    """As a job is that a cluster starts again."""
    words = ["fit", *TINY, "--folder", "mine", "--ckpt_path", "last", "--trainer.max_epochs"]
    for rounds in ("1", "2"):
        assert typed(capsys, *words, rounds).code == 0
        assert [row["round"] for row in rows(Path("mine/metrics.csv"))] == ["1", "2"][: int(rounds)]
    assert typed(capsys, "test", *TINY, "--folder", "mine", "--ckpt_path", "last").code == 0
    for folder in ([], ["--folder", ""]):
        [error] = typed(capsys, "fit", *TINY, "--ckpt_path", "last", *folder).errors
        assert error == (
            "lit-pfl: error: ckpt_path=last: give --folder RUN with it, or --ckpt_path RUN/checkpoints/last.ckpt."
        )


def test_a_folder_of_a_run_is_not_begun_anew(run, capsys):
    words = ["fit", *TINY, "--trainer.logger.save_dir", str(run.parent), "--trainer.logger.version", run.name]
    refused(capsys, run, [*words, "--trainer.logger.name", ""], "trainer.logger.version: there is a run in ")


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (["metrics.csv"], "It has no checkpoint to continue from; move it away, or choose another folder."),
        (["checkpoints"], "Continue it by --ckpt_path cut/checkpoints/last.ckpt, or choose another folder."),
    ],
)
def test_a_folder_of_a_whole_round_is_not_begun_anew(left, said, runs, run, capsys):
    shutil.copy(runs.two / "metrics.csv", run)
    for name in left:
        (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, made("cut") / name)
    refused(capsys, Path("cut"), ["fit", *TINY, "--folder", "cut"], f"folder: there is a run in cut. {said}")


@pytest.mark.seconds
def test_a_run_that_was_cut_off_in_its_first_round_is_begun_anew_in_its_folder(run, capsys):
    for name in ("config.yaml", "partition.csv"):
        made("cut").joinpath(name).write_text("# lit-pfl 0.1.0\nof before")
    (Path("cut") / "checkpoints").mkdir()
    assert typed(capsys, "fit", *TINY, "--folder", "cut", "--trainer.max_epochs", "1").errors == []
    config = yaml.safe_load(Path("cut/config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 1
    assert "of before" in Path("cut/config.cut_off.yaml").read_text()
    for name in ("partition.csv", "metrics.csv", "clients.csv"):
        assert Path("cut", name).read_bytes() == (run / name).read_bytes()


KILLS = """
import os, signal, sys
from lit_pfl.cli import main
from lit_pfl.lightning_internals import LastCheckpoint
LastCheckpoint._save_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_between_its_first_row_and_its_checkpoint_is_begun_anew_by_the_same_command(run, capsys):
    words = ["fit", *TINY, "--folder", "cut", "--trainer.max_epochs", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLS, *words], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not list(Path("cut").rglob("*.ckpt"))
    [row] = rows(Path("cut/metrics.csv"))
    Path("cut/metrics.csv").write_text("round,test/acc\n1,0.125\n")  # as one that was scored, without checkpoints
    assert typed(capsys, *words).errors == []
    assert {k: v for k, v in rows(Path("cut/metrics.csv"))[0].items() if k in row} == row
    for name in ("partition.csv", "metrics.csv", "clients.csv", "communication.csv"):
        assert Path("cut", name).read_bytes() == (run / name).read_bytes()
    assert Path("cut/metrics.cut_off.csv").read_text().endswith("1,0.125\n")


@pytest.mark.slow
def test_the_checkpoints_before_the_last_are_kept_and_a_damaged_one_offers_the_one_before(runs, capsys):
    keeps = ["--trainer.callbacks", "lit_pfl.lightning_internals.LastCheckpoint", "--trainer.callbacks.keep", "2"]
    words = ["fit", *TINY, "--folder", "kept", *keeps, "--trainer.max_epochs"]
    assert typed(capsys, *words, "2").errors == []
    last, before = Path("kept/checkpoints/last.ckpt"), Path("kept/checkpoints/last-1.ckpt")
    assert sorted(last.parent.iterdir()) == [before, last]
    assert [torch.load(path)["federation"]["coordinator"]["round"] for path in (before, last)] == [1, 2]
    last.write_bytes(flipped(0)(last.read_bytes()))
    [error] = typed(capsys, *words, "2", "--ckpt_path", str(last)).errors
    assert error.endswith(f"The one before it is whole: {before}."), error
    assert typed(capsys, *words, "2", "--ckpt_path", str(before)).errors == []
    assert_equal(state(Path("kept")), state(runs.two))
    assert torch.load(before)["federation"]["coordinator"]["round"] == 1  # the damaged one has not pushed it out
    before.write_bytes(b"")
    last.write_bytes(b"")
    assert "The one before" not in typed(capsys, *words, "2", "--ckpt_path", str(last)).errors[0]


def test_an_older_checkpoint_that_cannot_be_kept_leaves_nothing_behind_and_the_run_continues(tmp_path, monkeypatch):
    def full(source, to):
        Path(to).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "hardlink_to", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    fitting = trainer(2, callbacks=[LastCheckpoint(tmp_path, keep=2)], enable_checkpointing=True)
    with pytest.warns(
        UserWarning, match=r"last.ckpt cannot be kept as an older checkpoint \(.*No space left on device"
    ):
        fitting.fit(Federation(client(FedAvg)), datamodule=digits(2))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_of_two_that_begin_in_one_folder_at_once_one_is_told_so(capsys, monkeypatch):
    def after_the_other(logger):
        held.append(os.open(made("both"), os.O_RDONLY))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        raise FileExistsError

    held: list[int] = []
    monkeypatch.setattr(RunLogger, "make_folder", after_the_other)
    came = typed(capsys, "fit", *TINY, "--folder", "both")
    os.close(held[0])
    assert came.errors == ["lit-pfl: error: Another process is at work in both; wait for it, or choose another folder."]
    assert Path("both").is_dir()  # the other one's, and empty as yet


def test_a_configuration_of_one_s_own_is_not_overwritten(capsys):
    own = made("mine") / "config.yaml"
    own.write_text("# my best settings\n" + yaml.safe_dump({"trainer": {"max_epochs": 1}}))
    words = ["fit", *TINY, "--config", str(own), "--folder", "mine"]
    refused(
        capsys, Path("mine"), words, f"folder: {own} is not of a run, and would be overwritten; choose another folder."
    )


@pytest.mark.slow
def test_a_run_whose_first_logger_is_another_one_goes_on_in_its_folder(capsys):
    pytest.importorskip("tensorboard")
    loggers = [{"class_path": name, "init_args": {"save_dir": "runs"}} for name in ("TensorBoardLogger",) * 2]
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    words = [*TINY, "--config", "loggers.yaml", "--trainer.max_epochs"]
    assert typed(capsys, "fit", *words, "1").errors == []
    [last] = Path("runs").rglob("last.ckpt")
    moved = Path(shutil.move(last.parent.parent, "moved"))
    again = [*words, "2", "--ckpt_path", str(moved / "checkpoints/last.ckpt")]
    assert typed(capsys, "fit", *again).errors == []
    assert [row["round"] for row in rows(moved / "times.csv")[::4]] == ["1", "2"]
    assert (moved / "config.resumed_1.yaml").exists()
    assert {path.parent for path in Path().rglob("events.*")} == {moved, last.parent.parent.with_name("version_1")}
    assert typed(capsys, "test", *again).errors == []
    assert "test" in {row["split"] for row in rows(moved / "clients.csv")}


@pytest.mark.slow
def test_a_logger_that_cannot_go_on_is_told_of(capsys):
    words = [*TINY, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs", "--trainer.max_epochs"]
    typed(capsys, "fit", *words, "1")
    [last] = Path("runs").rglob("last.ckpt")
    came = typed(capsys, "fit", *words, "2", "--ckpt_path", str(last))
    assert f"CSVLogger cannot continue a run: this one gets another folder than {last.parent.parent}." in came.out
    Path("both.yaml").write_text("trainer: {logger: [RunLogger, {class_path: CSVLogger, init_args: {save_dir: csv}}]}")
    words = [*TINY, "--config", "both.yaml", "--folder", "mine", "--ckpt_path", "last", "--trainer.max_epochs"]
    assert "CSVLogger" not in typed(capsys, "fit", *words, "1").out
    assert "CSVLogger cannot continue a run: it begins another one." in typed(capsys, "fit", *words, "2").out


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.csv", b"round,val/acc\none,0.5\n", "line 2 has 'one' as 'round', which must be a number"),
        ("metrics.csv", b"epoch,val/acc\n1,0.5\n", "has no column 'round'"),
        ("metrics.csv", b"round,val/acc\n1,\xff\n", "is not a CSV file"),
        ("clients.csv", b"name,city\nAda,London\n", "has no column 'client'"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_damaged_table_is_refused_before_a_round_is_computed(command, name, content, said, run, capsys):
    (run / name).write_bytes(content)
    refused(capsys, run, [command, *resume(run)[1:]], f"run/{name}: {said}")


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("empty", [True, False])
def test_metrics_that_were_cut_off_lose_a_line_and_not_the_run(empty, run, capsys):
    path = run / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(b"" if empty else whole[: whole.rindex(b",")])
    lines = 0 if empty else len(whole.splitlines()) - 1
    with pytest.warns(UserWarning, match=rf"run/metrics.csv: was cut off after line {lines}; the run continues"):
        assert typed(capsys, *resume(run, "--trainer.max_epochs", "3")).errors == []
    assert [row["round"] for row in rows(path)][-1] == "3"


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["communication", "times", "sparsity", "similarity", "matching", "embeddings"])
def test_a_damaged_table_of_a_callback_is_refused_before_a_round_is_computed(name, run, capsys):
    path = run / f"{name}.csv"
    head = path.read_text().splitlines()[0]
    path.write_text(head + "\n" + head.replace("round", "one") + "\n")
    refused(capsys, run, resume(run), f"run/{name}.csv: line 2 has 'one' as 'round', which must be a number; mend it")
    path.write_text("round,other\n1,2\n")
    refused(capsys, run, resume(run), f"run/{name}.csv: has no column ")


@pytest.mark.seconds
def test_a_column_that_somebody_has_added_shifts_no_other(run, capsys):
    lines = (run / "times.csv").read_text().splitlines()
    (run / "times.csv").write_text("\n".join(f"{line.split(',')[0]},note,{line.partition(',')[2]}" for line in lines))
    typed(capsys, *resume(run, "--trainer.max_epochs", "3"))
    found = [(row["round"], row["phase"]) for row in rows(run / "times.csv")]
    phases = [phase for _, phase in found[: len(lines) - 1]]
    assert found == [(str(round), phase) for round in (1, 2, 3) for phase in phases]


class TestInPython:
    """What the federation knows by itself."""

    def saved(self, tmp_path: Path, **options: Any) -> Path:
        fitting = trainer(1)
        fitting.fit(
            Federation(client(SimFed), **{"seed": 3, "local_epochs": 2, "participation": 2, **options}),
            datamodule=digits(3),
        )
        fitting.save_checkpoint(tmp_path / "one.ckpt")
        return tmp_path / "one.ckpt"

    @pytest.mark.parametrize(
        ("method", "data", "options", "said"),
        [
            (client(FedAvg), digits(3), {}, "model: the checkpoint is of a run with SimFed, not FedAvg"),
            (client(SimFed), digits(3), {"local_epochs": 1}, "federation.local_epochs: .* with 2, not 1"),
            (client(SimFed), digits(3), {"participation": 1.0}, "federation.participation: .* with 2, not 1.0"),
            (client(SimFed), digits(3), {"seed": 4}, "federation.seed: .* with 3, not 4"),
            (client(SimFed), digits(4), {}, "data: the checkpoint holds 3 clients and the data has 4"),
            (client(SimFed), digits(3, seed=5), {}, "data: client 0 had other samples"),
            (client(SimFed), digits(3, permute_labels=True), {}, "data: client 0 had other samples, or other labels"),
            (client(SimFed), digits(3, evaluate_on="all"), {}, "data: client 0 had other samples"),
            (client(SimFed, factorization=None), digits(3), {}, "model: .* client 0's tensor 'learner.backbone"),
        ],
    )  # fmt: skip
    def test_another_run_is_refused(self, method, data, options, said, tmp_path):
        path = self.saved(tmp_path)
        federation = Federation(method, **{"seed": 3, "local_epochs": 2, "participation": 2, **options})
        with pytest.raises(ConfigError, match=said):
            trainer(2).fit(federation, datamodule=data, ckpt_path=path)

    @pytest.mark.parametrize("way", ["fit", "validate", "test", "predict"])
    def test_a_flipped_bit_of_a_weight_is_found_in_whatever_way_it_is_loaded(self, way, tmp_path):
        path = self.saved(tmp_path)
        weight = next(iter(torch.load(path)["federation"]["clients"][0]["state_dict"].values())).numpy().tobytes()
        whole = path.read_bytes()
        place = whole.index(weight)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        torch.load(path)  # which believes it
        federation = Federation(client(SimFed), seed=3, local_epochs=2, participation=2)
        with pytest.raises(ConfigError, match="one.ckpt is damaged: the checksum of"):
            getattr(trainer(2), way)(federation, datamodule=digits(3), ckpt_path=path)

    def test_a_seed_that_is_not_given_is_the_checkpoint_s(self, tmp_path):
        federation = Federation(client(SimFed), local_epochs=2, participation=2)
        trainer(2).fit(federation, datamodule=digits(3), ckpt_path=self.saved(tmp_path))
        assert federation.seed == 3

    def test_to_score_a_model_neither_epochs_nor_participation_matter(self, tmp_path):
        path = self.saved(tmp_path)
        trainer().test(Federation(client(SimFed)), datamodule=digits(3), ckpt_path=path, verbose=False)

    def test_a_logger_given_by_hand_goes_on_too(self, tmp_path):
        logger = RunLogger(str(tmp_path), name="", version="run")
        fitting: L.Trainer = trainer(1, logger=logger)
        fitting.fit(Federation(client(SimFed), seed=3), datamodule=digits(3))
        assert len(rows(tmp_path / "run/metrics.csv")) == 1


def test_an_option_that_is_no_more_is_told_from_one_that_differs():
    with pytest.raises(ConfigError, match=r"federation.stack_size=32 is .*, and there is no such option here. If"):
        taken({"federation.stack_size": 32}, {"federation.engine": None}, scoring=False)
    with pytest.raises(ConfigError, match="model.mu=None: the run that wrote the checkpoint has model.mu=1"):
        taken({"model": "A", "model.mu": 1}, {"model": "A"}, scoring=False)
