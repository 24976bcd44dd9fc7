"""On a GPU every method does what it does on the CPU. The same tests run on the CPU, of a few methods."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_every_method import METHODS, configured

from lit_pfl import Federation
from lit_pfl.engines import Stacked
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.testing import MethodTester
from lit_pfl.testing.method_tester import LOCAL_EPOCHS, BackToFront, digits, trainer, weights

FEW = ("FactorizedFL", "FedAvg", "SimFed")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLACES = [pytest.param("cpu", name, id=f"cpu-{name}") for name in FEW]
PLACES += [pytest.param("cuda", name, id=f"gpu-{name}", marks=GPU) for name in METHODS]


@pytest.fixture(autouse=True)
def _exact():
    """Let a GPU convolve in full precision, and the same way every time."""
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        yield


def fit(
    device: str, name: str, rounds: int, folder: Path | None = None, resume: bool = False, kind: type = Federation,
    **more: Any,
) -> Federation:  # fmt: skip
    """Run a method on a device; two of three clients take part where it is saved."""
    saving = {} if folder is None else {"callbacks": [LastCheckpoint(folder)], "enable_checkpointing": True}
    options = {"seed": 3, "threads": 1, "local_epochs": LOCAL_EPOCHS, "participation": 2 if folder else 1.0, **more}
    federation = kind(MethodTester(partial(configured, name)).method(), **options)
    fitting = trainer(rounds, accelerator=device, devices=1, **saving)
    fitting.fit(federation, datamodule=digits(), ckpt_path=folder / "last.ckpt" if resume else None)
    return federation


def assert_alike(one: Federation, other: Federation, tolerance: float) -> None:
    """Compare all clients' states, on the CPU, bit for bit where there is no tolerance."""
    for client, state in weights(one).items():
        expected = weights(other)[client]
        assert state.keys() == expected.keys()
        for tensor, value in state.items():
            torch.testing.assert_close(
                value.cpu(), expected[tensor].cpu(), rtol=tolerance, atol=tolerance, equal_nan=True,
                msg=lambda text, where=(client, tensor): f"client {where[0]}, {where[1]}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize(("device", "name"), PLACES)
def test_trains_resumes_and_evaluates(tmp_path, device, name):
    whole = fit(device, name, 4, tmp_path / "whole")
    devices = {tensor.device.type for client in whole.clients.values() for tensor in client.parameters()}
    assert devices == {device}
    scores = whole.trainer.callback_metrics
    assert all(0 <= scores[metric] <= 1 for metric in ("val/acc", "test/acc"))
    fit(device, name, 2, tmp_path / "parts")
    resumed = fit(device, name, 4, tmp_path / "parts", resume=True)
    assert_alike(resumed, whole, 0 if device == "cpu" else 1e-4)
    assert resumed.traffic.state_dict()["elements"] == pytest.approx(whole.traffic.elements, rel=1e-3)
    restored = Federation(MethodTester(partial(configured, name)).method(), participation=2, local_epochs=LOCAL_EPOCHS)
    testing = trainer(1, accelerator=device, devices=1)
    testing.test(restored, datamodule=digits(), ckpt_path=tmp_path / "whole" / "last.ckpt", verbose=False)
    assert float(testing.callback_metrics["test/acc"]) == pytest.approx(float(scores["test/acc"]), abs=1e-3)


@pytest.mark.parametrize(("device", "name"), PLACES)
def test_weights_are_the_cpu_s(device, name):
    assert_alike(fit(device, name, 2), fit("cpu", name, 2), 0 if device == "cpu" else 1e-3)


@pytest.mark.parametrize(("device", "name"), PLACES)
def test_the_order_of_clients_does_not_matter(device, name):
    backwards = fit(device, name, 3, kind=BackToFront)
    assert_alike(backwards, fit(device, name, 3), 0 if device == "cpu" else 1e-4)


@pytest.mark.parametrize(("device", "name"), [place for place in PLACES if place.values[1] in FEW])
def test_stacked_clients_come_to_what_they_would_one_after_another(device, name):
    assert_alike(fit(device, name, 2, engine=Stacked()), fit(device, name, 2), 1e-4 if device == "cpu" else 1e-3)
