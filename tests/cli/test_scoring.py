"""``test``, ``validate`` and ``predict`` write into the run that they score, and change nothing else of it."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from cli.typed import TINY, contents, rows, typed
from lit_pfl.cli import main
from lit_pfl.data import Digits

RUN = Path("runs/SimFed-Digits/version_0")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    main(["fit", *TINY, "--trainer.logger.save_dir", str(folder / "runs")])
    return folder


@pytest.fixture
def scored(fitted) -> list[str]:
    """A copy of a run in the current folder; what to type to score it."""
    shutil.copytree(fitted / "runs", "runs")
    return ["--config", str(RUN / "config.yaml"), "--ckpt_path", str(RUN / "checkpoints/last.ckpt")]


@pytest.mark.seconds
@pytest.mark.parametrize(("command", "split"), [("test", "test"), ("validate", "val")])
def test_the_same_scores_change_nothing_and_are_shown(command, split, scored, capsys):
    before = contents(Path("runs"))
    came = typed(capsys, command, *scored)
    assert came.code == 0
    assert contents(Path("runs")) == before, "no version folder, no other config, the same numbers"
    assert f"Personalized models after round 2, on each client's {split} data" in came.out
    assert "worst 10%" in came.out
    assert "dirpath has changed" not in came.out


@pytest.mark.seconds
def test_scores_of_an_earlier_round_leave_later_ones(scored, capsys):
    early = RUN / "early.ckpt"
    shutil.copy(RUN / "checkpoints/last.ckpt", early)
    shutil.move(early, RUN / "checkpoints/early.ckpt")
    typed(capsys, "fit", *scored, "--trainer.max_epochs", "3")
    before = rows(RUN / "metrics.csv")
    typed(capsys, "test", *scored[:3], str(RUN / "checkpoints/early.ckpt"))
    assert rows(RUN / "metrics.csv") == before
    assert [row["round"] for row in rows(RUN / "clients.csv")][-3:] == ["3"] * 3


@pytest.mark.seconds
def test_a_test_of_the_other_state_first_changes_no_number(scored, capsys):
    metrics, clients = rows(RUN / "metrics.csv"), (RUN / "clients.csv").read_text()
    typed(capsys, "test", *scored, "--federation.evaluate", "after")
    assert (RUN / "clients.csv").read_text() == clients
    tested = [row for row in rows(RUN / "clients.csv") if row["split"] == "test"]
    assert [row["model"] for row in tested] == ["personalized:before"] * 3 + ["personalized:after"] * 3
    assert [row["state"] for row in tested] == ["trained"] * 3 + ["aggregated"] * 3
    after = rows(RUN / "metrics.csv")
    assert [{name: row[name] for name in metrics[0]} for row in after] == metrics
    assert after[-1]["test/trained/acc"] == after[-1]["test/acc"]


def test_a_run_of_a_former_version_is_scored_and_gets_the_column(scored, capsys):
    """Its ``clients.csv`` has no column ``state``, and another word for clients that have never trained."""
    path = RUN / "clients.csv"
    new = rows(path)
    state = list(new[0]).index("state")
    old = [line.split(",") for line in path.read_text().splitlines() if "aggregated" not in line]
    path.write_text("".join(",".join(line[:state] + line[state + 1 :]) + "\n" for line in old))
    assert typed(capsys, "test", *scored).code == 0
    assert rows(path) == new


@pytest.mark.seconds
def test_another_model_or_other_data_are_not_scored(scored, capsys):
    before = contents(Path("runs"))
    for option, value in (("model.tau", "0.2"), ("data.seed", "5")):
        came = typed(capsys, "test", *scored, f"--{option}={value}")
        assert came.code == 2
        assert came.errors[0].startswith(f"lit-pfl: error: {option}={value}: the run that wrote the checkpoint has ")
    assert contents(Path("runs")) == before


@pytest.mark.seconds
def test_predictions_are_those_that_the_test_scores(scored, capsys):
    before = contents(RUN)
    came = typed(capsys, "predict", *scored)
    assert came.out.splitlines()[-1] == f"180 predictions: {RUN / 'predictions.csv'}"
    after = contents(RUN)
    assert after.pop("predictions.csv")
    assert after == before
    predictions = rows(RUN / "predictions.csv")
    assert list(predictions[0]) == ["client", "sample", "label", "prediction", "probability"]
    for row in rows(RUN / "clients.csv")[-3:]:
        own = [p for p in predictions if p["client"] == row["client"]]
        assert len(own) == int(row["n"])
        assert sum(p["label"] == p["prediction"] for p in own) / len(own) == pytest.approx(float(row["acc"]))
        assert all(0.1 <= float(p["probability"]) <= 1 for p in own)
    data = Digits(num_clients=3, permute_labels=True)
    data.setup()
    samples = [int(p["sample"]) for p in predictions if p["client"] == "1"]
    assert samples == data.indices["test"][1].tolist()
    labels = torch.cat([labels for _, labels in data.client(1).test]).tolist()
    assert [int(p["label"]) for p in predictions if p["client"] == "1"] == labels


@pytest.mark.seconds
def test_without_a_checkpoint_it_is_said_that_weights_are_untrained(capsys):
    for command in ("test", "validate"):
        came = typed(capsys, command, *TINY)
        assert came.code == 0
        assert "No --ckpt_path is given: the weights are untrained" in came.out
        assert "Untrained models, on each client's" in came.out
    assert typed(capsys, "predict", *TINY).errors[0].startswith("lit-pfl: error: ckpt_path: predict needs a checkpoint")
    assert not Path("runs").exists()


@pytest.mark.seconds
def test_progress_says_of_which_round_an_accuracy_is(capsys):
    out = typed(capsys, "fit", *TINY, "--trainer.check_val_every_n_epoch", "2", "--trainer.max_epochs", "3").out
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    acc = f"{float(rows(RUN / 'metrics.csv')[1]['val/acc']):.4f}"
    assert "not validated" in lines[0]
    assert f"accuracy {acc} ·" in lines[1]
    assert f"accuracy {acc} (of round 2) ·" in lines[2]


@pytest.mark.seconds
def test_a_folder_beside_a_checkpoint_is_the_one_of_its_run(scored, capsys):
    before = contents(Path("runs"))
    for command in ("test", "validate", "predict", "fit"):
        came = typed(capsys, command, *scored, "--folder", "elsewhere")
        assert came.code == 2
        said = f"folder=elsewhere: what is of a checkpoint is written into the run that it is of, {RUN}; leave --folder"
        assert came.errors[0].startswith(f"lit-pfl: error: {said}")
    assert contents(Path("runs")) == before
    assert typed(capsys, "test", *scored, "--folder", f"./{RUN}/").code == 0
    assert not Path("elsewhere").exists()


@pytest.mark.seconds
def test_a_checkpoint_that_is_in_no_run_is_scored_into_the_folder_that_is_asked_for(scored, capsys):
    shutil.copy(RUN / "checkpoints/last.ckpt", "alone.ckpt")
    assert typed(capsys, "test", *scored[:3], "alone.ckpt", "--folder", "elsewhere").code == 0
    assert rows(Path("elsewhere/metrics.csv"))[0]["test/acc"] == rows(RUN / "metrics.csv")[-1]["test/acc"]


@pytest.mark.seconds
def test_without_a_checkpoint_there_is_nothing_to_write_into_a_folder(capsys):
    came = typed(capsys, "test", *TINY, "--folder", "runs/mine")
    assert came.errors[0].startswith("lit-pfl: error: folder=runs/mine: test writes only what is of a checkpoint; give "
                                     "--ckpt_path runs/mine/checkpoints/last.ckpt")  # fmt: skip
    assert typed(capsys, "test", *TINY, "--trainer.logger", "TensorBoardLogger").code == 0
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("command", ["test", "predict", "fit"])
def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_computed(command, scored, capsys, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    before = contents(RUN)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # since root may write into any folder
    came = typed(capsys, command, *scored, *(["--trainer.max_epochs", "3"] if command == "fit" else []))
    assert came.code == 2
    said = f"The run folder cannot be written: [Errno 13] Permission denied: '{RUN}'. Make it writable, or copy it."
    assert came.errors == [f"lit-pfl: error: {said}"]
    assert "Personalized models" not in came.out
    assert contents(RUN) == before
