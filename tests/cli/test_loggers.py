"""Loggers hold every option of a run."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from cli.typed import ROOT, TINY, rows, typed
from lit_pfl.cli.options import by_name, differences, may_change, nested
from lit_pfl.cli.record import NEEDED, refuse_missing
from wandb_files import finish, wandb_config, wandb_history, wandb_models

CONFIG = {
    "seed_everything": 1,
    "model": {
        "class_path": "lit_pfl.methods.SimFed",
        "init_args": {"tau": 0.9, "backbone": {"class_path": "lit_pfl.models.ResNet9", "init_args": {"width": 2}}},
    },
    "federation": {"client_trainer": {"max_time": None}},
    "trainer": {"logger": [{"class_path": "lit_pfl_callbacks.RunLogger"}]},
}


def test_options_by_name():
    assert by_name(CONFIG) == {
        "seed_everything": 1,
        "model": "lit_pfl.methods.SimFed",
        "model.tau": 0.9,
        "model.backbone": "lit_pfl.models.ResNet9",
        "model.backbone.width": 2,
        "federation.client_trainer.max_time": None,
        "trainer.logger": [{"class_path": "lit_pfl_callbacks.RunLogger"}],
    }


def test_options_for_loggers():
    assert nested(CONFIG) == {
        "seed_everything": 1,
        "model": {"class": "SimFed", "tau": 0.9, "backbone": {"class": "ResNet9", "width": 2}},
        "federation": {"client_trainer": {"max_time": None}},
        "trainer": {"logger": [{"class": "RunLogger"}]},
    }


def test_differences_and_which_may_be():
    assert differences({"a": 1, "b": 2, "c": None}, {"b": 3, "a": 1}) == {"b": (2, 3)}  # a version may have no c yet
    assert [name for name in ("trainer.max_epochs", "trainer.precision", "data.root", "data.seed", "federation.threads",
                              "federation.seed", "trainer.gradient_clip_val", "model") if may_change(name)] == [
        "trainer.max_epochs", "data.root", "federation.threads"]  # fmt: skip


def test_another_logger_is_asked_for_too(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comet_ml" else find(name))
    [error] = typed(capsys, "fit", *TINY, "--trainer.logger", "CometLogger").errors
    assert error == "lit-pfl: error: trainer.logger=CometLogger needs Comet: pip install comet-ml."


@pytest.mark.parametrize(
    ("name", "module"), [(name, module) for name, (modules, _) in NEEDED.items() for module in modules]
)
def test_one_module_of_those_that_a_logger_works_with_is_enough(name, module, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda sought: True if sought == module else None)
    refuse_missing([Namespace(class_path=f"lightning.pytorch.loggers.{name}")])


def test_tensorboard_is_asked_for_in_one_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "tensorboard" in name else find(name))
    came = typed(capsys, "fit", *TINY, "--trainer.logger", "TensorBoardLogger")
    assert came.code == 2
    assert came.errors == [
        "lit-pfl: error: trainer.logger=TensorBoardLogger needs TensorBoard: pip install 'lit-pfl[tensorboard]'."
    ]


NUMBERS = ["comm/up/u", "comm/down/mu", "time/train", "time/link"]


def with_logger(name: str) -> list[str]:
    return ["fit", *TINY, "--config", str(ROOT / f"configs/logger/{name}.yaml")]


@pytest.mark.seconds
def test_wandb_has_numbers_pictures_tables_and_models_with_their_rounds(capsys):
    """All that is typed is one configuration more; without a network, read back from the file."""
    assert typed(capsys, *with_logger("wandb")).code == 0
    finish()
    [run] = Path("runs/wandb").glob("offline-run-*/*.wandb")
    history, axes = wandb_history(run)

    def rounds(name):
        return [row["round"] for row in history if name in row]

    metrics = rows(next(Path("runs").glob("*/version_0/metrics.csv")))
    assert [row["val/acc"] for row in history if "val/acc" in row] == [float(row["val/acc"]) for row in metrics]
    scores = ["val/acc", "val/acc_std", "val/acc_worst10", "train/loss", "comm/up_bytes", "comm/total_bytes"]
    for name in [*NUMBERS, "clients/val/acc", *scores]:
        assert (name, rounds(name), axes[name]) == (name, [1, 2], "round")
    pictures = ["similarity/u", "similarity/v", "similarity/embedding", "similarity/update", "matching"]
    for name in [*pictures, "sparsity/density", "sparsity/parameters"]:
        assert (name, rounds(name), axes[name]) == (name, [1], "round")
    [picture] = [row["similarity/u"] for row in history if "similarity/u" in row]
    assert (picture["_type"], picture["width"], picture["height"]) == ("image-file", 258, 258)
    assert (run.parent / "files" / picture["path"]).is_file()
    [histogram] = [row["clients/val/acc"] for row in history if row.get("round") == 2 and "clients/val/acc" in row]
    assert sum(histogram["values"]) == 3
    [table] = [row["clients/test"] for row in history if "clients/test" in row]
    content = json.loads((run.parent / "files" / table["path"]).read_text())
    lines = rows(next(Path("runs").glob("*/version_0/clients.csv")))
    assert [row[0] for row in content["data"]] == [0, 1, 2] * 2  # as trained, and as aggregated
    assert content["columns"] == list(lines[0])
    assert (table["_type"], table["nrows"], rounds("clients/test")) == ("table-file", 6, [2])
    config = wandb_config(run)
    assert (config["model"]["class"], config["data"]["num_clients"]) == ("SimFed", 3)
    recorded = yaml.safe_load(next(Path("runs").glob("*/version_0/config.yaml")).read_text())
    assert {key: config[key] for key in recorded} == nested(recorded), "every option, to filter runs by"
    assert wandb_models(run) == {f"models-{run.stem[4:]}": [f"client_{k}.safetensors" for k in range(3)]}
    assert len(list(Path("runs/wandb").glob("offline-run-*"))) == 1
    # and a resumed run goes on with the same one
    [folder] = Path("runs").glob("*/version_0")
    again = ["--ckpt_path", str(folder / "checkpoints" / "last.ckpt"), "--trainer.max_epochs", "3"]
    assert typed(capsys, *with_logger("wandb"), *again).code == 0
    finish()
    ids = {path.name.rpartition("-")[2] for path in Path("runs/wandb").glob("offline-run-*")}
    assert ids == {run.stem.removeprefix("run-")}


@pytest.mark.seconds
def test_tensorboard_gets_scalars_pictures_and_options(capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert typed(capsys, *with_logger("tensorboard")).code == 0
    [folder] = {path.parent for path in Path("runs").rglob("events.*")}
    events = EventAccumulator(str(folder), {"histograms": 0, "images": 0, "scalars": 0, "tensors": 0})  # all of them
    events.Reload()
    for name in ["val/acc", *NUMBERS]:
        assert [event.step for event in events.Scalars(name)] == [1, 2]
    assert [event.step for event in events.Histograms("clients/val/acc")] == [1, 2]
    assert [event.step for event in events.Images("similarity/u")] == [1]
    assert [event.step for event in events.Tensors("clients/test/text_summary")] == [2]
    metrics = rows(next(Path("runs").glob("*/version_0/metrics.csv")))
    curve = {event.step: event.value for event in events.Scalars("val/acc over bytes")}
    expected = {int(float(row["comm/total_bytes"])): float(row["val/acc"]) for row in metrics}
    assert curve == pytest.approx(expected, abs=1e-6)
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["model"]["class"] == "SimFed"


@pytest.mark.slow
def test_mlflow_gets_the_same(capsys):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")  # of the smaller mlflow-skinny, what its data base needs
    from mlflow.tracking import MlflowClient

    assert typed(capsys, *with_logger("mlflow")).code == 0
    client = MlflowClient("sqlite:///mlflow.db")
    [experiment] = client.search_experiments(filter_string="name = 'lit-pfl'")
    [run] = client.search_runs([experiment.experiment_id])
    for name in ["val/acc", *NUMBERS]:
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, name)] == [1, 2]
    kept = {path.name for path in Path("runs/mlflow").rglob("*") if path.is_file()}
    assert {"client_0.safetensors", "client_2.safetensors", "round_2.json"} <= kept
    assert run.data.params["model/class"] == "SimFed"


@pytest.mark.seconds
def test_other_callbacks_of_a_configuration_stay_and_replace_the_defaults(capsys):
    Path("own.yaml").write_text(
        "trainer: {callbacks: [{class_path: lit_pfl_callbacks.CommunicationLedger, init_args: {per_client: true}}]}"
    )
    words = ["fit", *TINY, "--config", "own.yaml", "--config", str(ROOT / "configs/logger/wandb.yaml")]
    assert typed(capsys, *words, "--trainer.max_epochs", "1").code == 0
    finish()
    [folder] = Path("runs").glob("*/version_0")
    assert {row["client"] for row in rows(folder / "communication.csv")} == {"0", "1", "2"}
    assert (folder / "models" / "client_1.safetensors").is_file()
    tables = {"communication.csv", "times.csv", "sparsity.csv", "similarity.csv", "matching.csv", "embeddings.csv"}
    assert tables <= {path.name for path in folder.iterdir()}


@pytest.mark.seconds
def test_the_run_folder_is_the_one_that_is_asked_for(capsys):
    loggers = ["--config", str(ROOT / "configs/logger/wandb.yaml"), "--trainer.max_epochs=1"]
    assert typed(capsys, "fit", *TINY, *loggers, "--folder=here/mine").code == 0
    assert [row["round"] for row in rows(Path("here/mine/metrics.csv"))] == ["1"]
    assert "folder" not in yaml.safe_load(Path("here/mine/config.yaml").read_text())
    again = typed(capsys, "fit", *TINY, *loggers, "--folder=here/mine")
    assert "there is a run in here/mine" in again.errors[0]
    finish()


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["7", "2026_11_28"])
def test_a_run_folder_may_be_called_by_a_number(name, capsys):
    words = ["fit", *TINY, f"--folder=seeds/{name}", "--ckpt_path=last"]
    for rounds in (1, 2):
        assert typed(capsys, *words, f"--trainer.max_epochs={rounds}").code == 0
    assert [path.name for path in Path("seeds").iterdir()] == [name]
    assert [row["round"] for row in rows(Path("seeds", name, "metrics.csv"))] == ["1", "2"]


TENSORBOARD = """
trainer:
  logger:
  - class_path: TensorBoardLogger
    init_args: {save_dir: board, name: "", version: same}
"""


@pytest.mark.seconds
def test_the_run_folder_is_the_run_loggers_wherever_it_is_in_the_list(capsys):
    pytest.importorskip("tensorboard")
    Path("both.yaml").write_text(f"{TENSORBOARD}  - class_path: RunLogger\n")
    words = ["fit", *TINY, "--config", "both.yaml", "--folder", "mine"]
    assert typed(capsys, *words, "--trainer.max_epochs", "1").code == 0
    assert typed(capsys, *words, "--ckpt_path", "last").code == 0
    assert [row["round"] for row in rows(Path("mine/metrics.csv"))] == ["1", "2"]
    assert not {"metrics.csv", "config.yaml", "checkpoints"} & {path.name for path in Path("board/same").iterdir()}


@pytest.mark.slow
def test_a_run_in_the_folder_of_another_logger_is_refused_too(capsys):
    pytest.importorskip("tensorboard")
    Path("board.yaml").write_text(TENSORBOARD)
    words = ["fit", *TINY, "--config", "board.yaml", "--trainer.max_epochs", "1"]
    assert typed(capsys, *words).code == 0
    before = Path("board/same/config.yaml").read_text()
    [error] = typed(capsys, *words, "--model.optimizer.lr", "0.3").errors
    assert "there is a run in board/same. Continue it by --ckpt_path board/same/checkpoints/last.ckpt" in error
    assert Path("board/same/config.yaml").read_text() == before
    last = "board/same/checkpoints/last.ckpt"
    assert typed(capsys, *words, "--ckpt_path", last, "--trainer.max_epochs", "2").code == 0
    shutil.copy(last, "elsewhere.ckpt")  # it is scored into the folder that the logger names
    assert typed(capsys, "test", *words[1:], "--ckpt_path", "elsewhere.ckpt").code == 0


def test_wandb_without_an_account_is_told_before_anything_is_computed(capsys, monkeypatch):
    import wandb

    def no_account(**options):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", no_account)
    came = typed(capsys, *with_logger("wandb"))
    assert came.errors == [
        "lit-pfl: error: trainer.logger=WandbLogger: No API key configured. Use `wandb login` to log in. Without an "
        "account or a network: WANDB_MODE=offline."
    ]
    assert not list(Path("runs").glob("SimFed-Digits/*"))


@pytest.mark.slow
def test_wandb_as_the_only_logger_has_one_folder_before_and_after_a_resume(capsys):
    words = ["fit", *TINY, "--trainer.logger", "WandbLogger", "--trainer.logger.save_dir", "runs"]
    assert typed(capsys, *words, "--trainer.max_epochs", "1").code == 0
    [last] = Path("runs").rglob("last.ckpt")
    finish()
    assert typed(capsys, *words, "--ckpt_path", str(last)).code == 0
    finish()
    assert [path.name for path in last.parent.parent.parent.iterdir()] == [last.parent.parent.name]
    assert [row["round"] for row in rows(last.parent.parent / "times.csv")[::4]] == ["1", "2"]
