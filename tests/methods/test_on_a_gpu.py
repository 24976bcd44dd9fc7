"""On a GPU every method does what it does on the CPU. The same tests run on the CPU, of a few methods."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_every_method import METHODS, configured

from lit_pfl import Federation
from lit_pfl.cli import main
from lit_pfl.core.asynchronous import FedBuff
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.robust import CoordinateMedian, GeometricMedian, MultiKrum, NormClipping, TrimmedMean
from lit_pfl.engines import Local, Stacked
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.testing import MethodTester
from lit_pfl.testing.method_tester import LOCAL_EPOCHS, BackToFront, trainer, weights
from lit_pfl_callbacks.random_state import torch_state_kept

FEW = ("FactorizedFL", "FedAvg", "SimFed")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLACES = [pytest.param("cpu", name, id=f"cpu-{name}") for name in FEW]
PLACES += [pytest.param("cuda", name, id=f"gpu-{name}", marks=GPU) for name in METHODS]
SOME = [place for place in PLACES if place.values[1] in FEW]


@pytest.fixture(autouse=True)
def _exact():
    """Let a GPU convolve in full precision, and the same way every time."""
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        yield


def fit(
    device: str, name: str, rounds: int, folder: Path | None = None, resume: bool = False, kind: type = Federation,
    precision: Any = None, mean: Any = None, **more: Any,
) -> Federation:  # fmt: skip
    """Run a method on a device; two of three clients take part where it is saved."""
    saving = {} if folder is None else {"callbacks": [LastCheckpoint(folder)], "enable_checkpointing": True}
    options = {"seed": 3, "threads": 1, "local_epochs": LOCAL_EPOCHS, "participation": 2 if folder else 1.0, **more}
    tester = MethodTester(partial(configured, name))
    method = tester.method()
    method.mean = mean
    federation = kind(method, **options)
    fitting = trainer(rounds, accelerator=device, devices=1, precision=precision, **saving)
    fitting.fit(federation, datamodule=tester.digits(), ckpt_path=folder / "last.ckpt" if resume else None)
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


@pytest.mark.seconds
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
    tester = MethodTester(partial(configured, name))
    restored = Federation(tester.method(), participation=2, local_epochs=LOCAL_EPOCHS)
    testing = trainer(1, accelerator=device, devices=1)
    testing.test(restored, datamodule=tester.digits(), ckpt_path=tmp_path / "whole" / "last.ckpt", verbose=False)
    assert float(testing.callback_metrics["test/acc"]) == pytest.approx(float(scores["test/acc"]), abs=1e-3)


@pytest.mark.parametrize(("device", "name"), PLACES)
def test_weights_are_the_cpu_s(device, name):
    assert_alike(fit(device, name, 2), fit("cpu", name, 2), 0 if device == "cpu" else 1e-3)


@pytest.mark.seconds
@pytest.mark.parametrize(("device", "name"), PLACES)
def test_the_order_of_clients_does_not_matter(device, name):
    backwards = fit(device, name, 3, kind=BackToFront)
    assert_alike(backwards, fit(device, name, 3), 0 if device == "cpu" else 1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize(("device", "name"), PLACES)
def test_stacked_clients_come_to_what_they_would_one_after_another(device, name):
    try:
        stacked = fit(device, name, 2, engine=Stacked())
    except ConfigError as error:
        assert name not in FEW
        pytest.skip(str(error))
    assert_alike(stacked, fit(device, name, 2), 1e-4 if device == "cpu" else 1e-3)


@pytest.mark.seconds
@pytest.mark.parametrize(("device", "name"), SOME)
def test_clients_on_disk_come_to_what_those_in_memory_do(device, name):
    on_disk = fit(device, name, 3, engine=Local(awake=1))
    assert_alike(on_disk, fit(device, name, 3, engine=Local()), 0 if device == "cpu" else 1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize(("device", "name"), SOME)
def test_a_run_goes_on_on_another_device(tmp_path, device, name):
    fit(device, name, 2, tmp_path)
    moved = fit("cpu", name, 4, tmp_path, resume=True)
    assert {tensor.device.type for client in moved.clients.values() for tensor in client.parameters()} == {"cpu"}
    fit("cpu", name, 2, tmp_path / "back")
    back = fit(device, name, 4, tmp_path / "back", resume=True)
    assert_alike(back, moved, 0 if device == "cpu" else 1e-3)


@pytest.mark.seconds
@pytest.mark.parametrize(("device", "name"), SOME)
def test_mixed_precision(tmp_path, device, name):
    for precision in ("bf16-mixed", *(["16-mixed"] if device == "cuda" else [])):
        folder = tmp_path / precision
        whole = fit(device, name, 4, folder / "whole", precision=precision)
        assert all(w.isfinite().all() for client in weights(whole).values() for w in client.values())
        fit(device, name, 2, folder / "parts", precision=precision)
        resumed = fit(device, name, 4, folder / "parts", resume=True, precision=precision)
        assert_alike(resumed, whole, 0 if device == "cpu" else 1e-3)


@pytest.mark.seconds
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    "options",
    [
        *({"mean": mean} for mean in (CoordinateMedian(), TrimmedMean(0.3), MultiKrum(0), GeometricMedian())),
        {"mean": NormClipping(0.1)},
        {"privacy": ClientPrivacy(1.0, 0.5)},
        {"privacy": ClientPrivacy(1.0, 0.5, where="local")},
        {"asynchronous": FedBuff(2)},
        {"max_update_norm": 100.0},
    ],
    ids=lambda options: " ".join(f"{name}={type(value).__name__}" for name, value in options.items()),
)
def test_means_and_noise_are_the_cpu_s(device, options):
    if "privacy" in options:
        pytest.importorskip("dp_accounting")
    assert_alike(*(fit(place, "FedAvg", 3, **options) for place in (device, "cpu")), 1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_device_s_random_numbers_are_put_back(device):
    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    with torch_state_kept():
        torch.manual_seed(6)
        torch.rand(3, device=device)
    assert torch.rand(3, device=device).tolist() == expected.tolist()


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=GPU)])
def test_the_command_line(tmp_path, device):
    run = tmp_path / "run"
    few = ["--trainer.max_epochs=2", "--data.num_clients=3", "--trainer.enable_progress_bar=false"]
    config = str(Path(__file__).parents[2] / "configs" / "simfed.yaml")
    main(["fit", "--config", config, f"--folder={run}", f"--trainer.accelerator={device}", *few])
    ckpt = f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    main(["test", "--config", str(run / "config.yaml"), ckpt])
    main(["predict", "--config", str(run / "config.yaml"), ckpt])
    assert {"predictions.csv", "metrics.csv"} <= {path.name for path in run.iterdir()}
