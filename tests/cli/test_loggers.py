"""Loggers hold every option of a run."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from cli.typed import TINY, typed
from lit_pfl.cli.options import by_name, differences, may_change, nested

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
    assert differences({"a": 1, "b": 2, "c": None}, {"b": 3, "a": 1}) == {"b": (2, 3), "c": (None, None)}
    assert [name for name in ("trainer.max_epochs", "trainer.precision", "data.root", "data.seed", "federation.threads",
                              "federation.seed", "trainer.gradient_clip_val", "model") if may_change(name)] == [
        "trainer.max_epochs", "data.root", "federation.threads"]  # fmt: skip


def test_tensorboard_is_asked_for_in_one_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "tensorboard" in name else find(name))
    came = typed(capsys, "fit", *TINY, "--trainer.logger", "TensorBoardLogger")
    assert came.code == 2
    assert came.errors == [
        "lit-pfl: error: trainer.logger=TensorBoardLogger needs TensorBoard: pip install 'lit-pfl[tensorboard]'."
    ]


def test_tensorboard_gets_scalars_and_options(capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["fit", *TINY, "--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "runs"]
    assert typed(capsys, *words).code == 0
    [folder] = {path.parent for path in Path("runs").rglob("events.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("val/acc")] == [1, 2]
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["model"]["class"] == "SimFed"
