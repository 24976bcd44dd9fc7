"""What holds for every method, whoever writes it: a new one is tested here without being named."""

import csv
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import LambdaCallback

import lit_pfl.methods
from lit_pfl import Client, Federation
from lit_pfl.cli import main
from lit_pfl.lightning_internals import read_checkpoint
from lit_pfl.testing import METHOD_CHECKS, MethodTester
from lit_pfl.testing.methods import resumed_equals_uninterrupted, two_rounds_are_logged
from tiny import ALWAYS, OF_THE_PAPERS, always_first, digits, trainer

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted(
    name for name in lit_pfl.methods.__all__ if issubclass(getattr(lit_pfl.methods, name), Client)
)  # fmt: skip
MADE_BY = {"backbone": "make_backbone", "scheduler": "make_scheduler"}

OTHER_CHECKS = [check for check in METHOD_CHECKS if check is not resumed_equals_uninterrupted]


def told(name: str, *values: Any, first: bool = False) -> Any:
    """Return a method, with whatever else a test is given, as a parameter; the first check is of all by default."""
    default, slow = name in ALWAYS or first, name in OF_THE_PAPERS
    return pytest.param(name, *values, marks=() if default else pytest.mark.slow if slow else pytest.mark.full)


@cache
def read(name: str) -> tuple[ArgumentParser, Any]:
    """Return what a method's own configuration says of it, and the parser that has read it."""
    model = yaml.safe_load((CONFIGS / f"{name.lower()}.yaml").read_text())["model"]
    for own in ("learner", "head"):  # of a method of adapters, where a tester has networks for images
        model["init_args"].pop(own, None)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Client, "model")
    return parser, parser.parse_object({"model": model})


def configured(name: str, **options: Any) -> Client:
    """Return a method with the options of its own configuration, and further ones."""
    parser, parsed = read(name)
    method: Client = parser.instantiate(parsed).model
    for option, value in options.items():
        setattr(method, MADE_BY.get(option, option), value)
    return method


@pytest.mark.parametrize(
    ("name", "check"),
    [told(name, check, first=check is two_rounds_are_logged) for name in METHODS for check in OTHER_CHECKS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_method(name, check):
    check(MethodTester(partial(configured, name)))


@pytest.mark.every
@pytest.mark.parametrize("name", always_first(METHODS))
def test_every_method_resumes(name):
    resumed_equals_uninterrupted(MethodTester(partial(configured, name)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [told(name) for name in METHODS if name not in ("FedMA", "StandAlone")])
def test_every_method_without_what_is_to_stay_at_home(name):
    tester = MethodTester(partial(configured, name, local=r"body.*bias"))
    federation, sent = Federation(tester.method(), seed=1, threads=1), []
    watching = LambdaCallback(
        on_fit_start=lambda *_: federation.traffic.watchers.append(lambda transfer: sent.extend(transfer.tensors))
    )
    trainer(2, callbacks=[watching]).fit(federation, datamodule=digits(3))
    assert sent or name == "FedPer"  # whose own two layers are all that this network has
    assert not [name for name in sent if "body" in name and "bias" in name]
    one, other = (dict(federation.clients[k].learner.named_parameters()) for k in (0, 1))
    assert any(not torch.equal(weight, other[n]) for n, weight in one.items() if "body" in n and "bias" in n)
    resumed_equals_uninterrupted(tester)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [told(name) for name in METHODS])
def test_two_rounds_from_its_own_configuration(name, tmp_path):
    config = CONFIGS / f"{name.lower()}.yaml"
    small = {"data.num_clients": 3, "federation.local_epochs": 2, "trainer.max_epochs": 2,
             "trainer.enable_progress_bar": "false", "trainer.logger.save_dir": tmp_path}  # fmt: skip
    options = yaml.safe_load(config.read_text())["model"]["init_args"]
    if "learner" in options:
        for library in ("peft", "transformers"):
            pytest.importorskip(library)
    else:
        small |= {"data.train_fraction": 0.05, "data.test_fraction": 0.9}
        if "width" in options["backbone"].get("init_args", {}):
            small["model.backbone.width"] = 2
    main(["fit", "--config", str(config), *(f"--{name}={value}" for name, value in small.items())])
    [folder] = tmp_path.glob("*/version_0")
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [float(row["round"]) for row in rows] == [1, 2]
    assert {"train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc", "comm/up_bytes", "comm/down_bytes",
            "comm/total_bytes"} <= set(rows[0])  # fmt: skip
    assert all(0 <= float(row["val/acc"]) <= 1 and float(row["train/loss"]) > 0 for row in rows)
    assert float(rows[-1]["test/acc"]) >= 0
    read_checkpoint(folder / "checkpoints" / "last.ckpt")  # holds nothing that a resume would not read
