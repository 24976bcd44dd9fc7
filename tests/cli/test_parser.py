"""Tests of what the parser makes of arguments before it reads them."""

import pytest
import yaml

from cli.typed import TINY, typed
from lit_pfl.cli.parser import names_first


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        ("fit --model.tau 1 --model SimFed", "fit --model SimFed --model.tau 1"),
        ("fit --model.tau=1 --data Digits --model=SimFed", "fit --model=SimFed --model.tau=1 --data Digits"),
        (
            "fit --model.backbone.width 4 --model.backbone MLP --model FedAvg",
            "fit --model FedAvg --model.backbone MLP --model.backbone.width 4",
        ),
        ("fit --model.a 1 --config x --model.b -2 --model M", "fit --model.a 1 --config x --model M --model.b -2"),
        ("fit --model.a 1 -c x --model M", "fit --model.a 1 -c x --model M"),
    ],
)
def test_a_class_goes_before_its_options(words, ordered):
    assert names_first(words.split()) == ordered.split()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "fit --config x --model SimFed --model.tau 1",
        "fit --model SimFed --model.tau 1 --model FedAvg",  # a second choice stays one
        "fit --models.tau 1 --model FedAvg",
        "fit --trainer.max_epochs 1 --trainer {}",
        "fit --trainer.callbacks+=A --trainer.callbacks.x 1 --trainer.callbacks+=B",
    ],
)
def test_other_arguments_stay_where_they_are(words):
    assert names_first(words.split()) == words.split()


def test_a_run_of_a_class_behind_its_options(tmp_path, capsys):
    options = ["--model.backbone.hidden", "8", "--model.backbone", "MLP", "--model.local", "head", "--model", "FedAvg"]
    came = typed(capsys, "fit", *TINY, *options, "--folder", "run")
    assert came.code == 0
    model = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]
    assert model["class_path"] == "lit_pfl.methods.FedAvg"
    assert model["init_args"]["local"] == "head"
    assert model["init_args"]["backbone"]["init_args"]["hidden"] == 8
