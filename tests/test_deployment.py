"""Personalized models in use without this library."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from cli.typed import TINY, contents, rows, typed
from lit_pfl import Federation
from lit_pfl.cli.export import deployment
from lit_pfl.data import ClassShards, Table, label_permutation
from lit_pfl.errors import ConfigError
from lit_pfl.export.deployment import PROGRAM, SCRIPT, WEIGHTS, Deployment
from lit_pfl.methods import (
    APFL,
    Ditto,
    FedAvg,
    FedCP,
    FedProto,
    FedRoD,
    FedSLR,
    KNNPer,
    PFedPara,
    PsiNet,
    SimFed,
)
from lit_pfl.models import Backbone
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks.run_folder import write_rows
from tiny import GroupNet, Learner, client, digits, trainer

with_onnx = pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs the extra export")


class Net(Backbone):
    """Two convolutions and a linear layer: enough to share one and to divide the others."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 10, 3), nn.BatchNorm2d(10), nn.ReLU(),
            nn.Conv2d(10, 20, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(20, classes))


class Rows(Learner):
    def __init__(self):
        super().__init__(nn.Identity(), nn.Linear(13, 3))


class Doubled(Rows):
    """Whose batches are changed outside of its ``forward``."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch[0], batch[1]


class Classes(Rows):
    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)


class Named(Rows):
    def predict_step(self, batch, batch_idx):
        return {"logits": self(batch[0])}


class Fails(Rows):
    def predict_step(self, batch, batch_idx):
        raise ZeroDivisionError


METHODS = {
    "factorized": lambda: client(SimFed, tau=-1.0, factorization=Factorization(form="FFxIO", threshold=0.01)),
    "hadamard": lambda: client(PFedPara),
    "trimmed": lambda: client(PsiNet, backbone=Net, depth=1),
    "mixed": lambda: client(FedSLR, lam=0.02, mu=0.05),
    "Ditto": lambda: client(Ditto),
    "APFL_logits": lambda: client(APFL, alpha=0.7, mixing="logits"),
    "APFL_parameters": lambda: client(APFL, alpha=0.7, backbone=GroupNet),
}
DATA = {"trimmed": {"partition": ClassShards(2), "num_clients": 5}}
#: what a process does that has none of this library: it runs the program as it is, with the weights of the other file
ELSEWHERE = """
import sys
sys.path = [path for path in sys.path if path not in sys.argv[2:]]
sys.modules["lit_pfl"] = sys.modules["lit_pfl_callbacks"] = None  # whatever else there may be
import numpy, onnxruntime, safetensors.torch, torch
for folder in open(sys.argv[1]).read().split("\\n"):
    images = numpy.load(folder + "/images.npy")
    program = torch.export.load(folder + "/model.pt2").module()
    numpy.save(folder + "/program.npy", program(torch.from_numpy(images)).detach().numpy())
    weights = safetensors.torch.load_file(folder + "/model.safetensors")
    for tensor in program.state_dict().values():
        tensor.data.zero_() if tensor.is_floating_point() else None
    program.load_state_dict(weights)
    numpy.save(folder + "/weights.npy", program(torch.from_numpy(images)).detach().numpy())
    session = onnxruntime.InferenceSession(folder + "/model.onnx")
    numpy.save(folder + "/onnx.npy", session.run(None, {"inputs": images})[0])
assert not [name for name in sys.modules if name.startswith("lit_pfl") and sys.modules[name]]
"""


def trained(method, data, **options) -> Federation:
    federation = Federation(method, seed=3, threads=1, **options)
    trainer(1).fit(federation, datamodule=data)
    return federation


def own_logits(federation, number):
    """Return a client's predictions of its test data, as `predict` makes them."""
    [*parts] = trainer().predict(federation, datamodule=federation.data)
    return {k: v for part in parts for k, v in part.items()}[number]


def raw_images(data, number):
    """Return a client's test images as they are."""
    return data.data.images[data.client(number).test.samples_of()]


@pytest.mark.slow
@with_onnx
def test_the_same_logits_by_onnx_runtime_and_in_a_process_without_this_library(tmp_path):
    expected: dict[str, np.ndarray] = {}
    for name, method in METHODS.items():
        data = digits(**{"num_clients": 3, "permute_labels": name not in DATA, **DATA.get(name, {})})
        federation = trained(method(), data, local_epochs=2)
        folder = tmp_path / name
        deployment(federation, data, 1).save(folder)
        np.save(folder / "images.npy", raw_images(data, 1).numpy())
        expected[str(folder)] = own_logits(federation, 1).numpy()
    (tmp_path / "folders").write_text("\n".join(expected))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    subprocess.run([sys.executable, "-I", "-c", ELSEWHERE, str(tmp_path / "folders"), *paths], check=True)
    for folder, logits in expected.items():
        assert len(logits) > 5
        for way in ("program", "weights", "onnx"):
            found = np.load(f"{folder}/{way}.npy")
            np.testing.assert_allclose(found, logits, atol=1e-5, rtol=1e-5, err_msg=f"{folder} {way}")
    assert np.isinf(expected[str(tmp_path / "trimmed")]).sum(1).tolist() == [8] * len(
        expected[str(tmp_path / "trimmed")]
    )


@pytest.mark.slow
@with_onnx
def test_the_five_lines_name_the_class_in_the_clients_own_order(tmp_path):
    """Without this library, from a picture file, larger than the model's images and in colour."""
    data = digits(3, permute_labels=True)
    federation = trained(client(FedAvg), data, local_epochs=3)
    folder = tmp_path / "exported"
    deployment(federation, data, 2, {"Said": "of the model"}).save(folder)
    assert len((folder / SCRIPT).read_text().splitlines()) == 5
    order = label_permutation(2, 10)
    about = json.loads((folder / "model.json").read_text())
    assert about["labels"] == [str(order.index(label)) for label in range(10)]
    image = raw_images(data, 2)[0, 0].numpy()
    Image.fromarray(image).resize((8, 8)).convert("RGB").save(tmp_path / "image.png")
    shown = subprocess.run(
        [sys.executable, "-I", SCRIPT, str(tmp_path / "image.png")],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    guess = int(own_logits(federation, 2)[0].argmax())
    assert shown.stdout == f"{order.index(guess)}\n"
    card = (folder / "README.md").read_text()
    assert "- Client: 2\n" in card
    assert "- Said: of the model\n" in card
    assert f"- Trained on: {data.client(2).num_samples} samples\n" in card
    counts = data.class_counts("train")[2]
    assert all(f"{c} ({n})" in card for c, n in enumerate(counts))
    assert f"| {WEIGHTS} | {(folder / WEIGHTS).stat().st_size} |" in card


def test_after_aggregation_it_is_the_model_with_the_reply(tmp_path):
    data = digits(3)
    federation = trained(client(FedAvg), data, evaluate="after")
    models = [deployment(federation, data, k).network(raw_images(data, 0)) for k in (0, 1)]
    torch.testing.assert_close(models[0], own_logits(federation, 0), atol=1e-5, rtol=1e-5)
    states = [c.backbone.body[0].weight for c in federation.clients.values()]
    assert not torch.equal(states[0], states[1])  # the clients are as they were
    reply = federation.coordinator.server.reply(0)["backbone.body.0.weight"]
    assert all(torch.equal(federation.standalone(k).body[0].weight, reply) for k in range(3))


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedCP, FedProto, FedRoD, KNNPer])
def test_methods_that_change_what_a_head_makes_are_exported_for_any_number_of_images(tmp_path, method):
    data = digits(2)
    federation = trained(client(method), data)
    deployment(federation, data, 0).save(tmp_path, onnx=False)
    with torch.no_grad():
        found = torch.export.load(tmp_path / PROGRAM).module()(raw_images(data, 0))
    torch.testing.assert_close(found, own_logits(federation, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Rows, Doubled, Classes, Named, Fails])
def test_where_a_client_predicts_other_values_than_its_forward_that_is_said(recwarn, kind):
    data = Table("wine", num_clients=2)
    deployment(trained(FedAvg(learner=kind()), data), data, 0)
    said = [one for one in recwarn if f"predicts other values than the forward of {kind.__name__}" in str(one.message)]
    assert len(said) == (kind not in (Rows, Fails))


def test_models_of_tables_are_exported_without_preprocessing(tmp_path):
    data = Table("wine", num_clients=2)
    federation = trained(FedAvg(learner=Learner(nn.Identity(), nn.Linear(13, 3))), data)
    model = deployment(federation, data, 0)
    model.save(tmp_path, onnx=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "model.json", PROGRAM, WEIGHTS]
    x = next(iter(data.client(0).test))[0]
    found = torch.export.load(tmp_path / PROGRAM).module()(x)
    torch.testing.assert_close(found, federation.clients[0].learner(x))
    assert json.loads((tmp_path / "model.json").read_text())["labels"] == ["class_0", "class_1", "class_2"]


def test_what_cannot_be_exported_is_said():
    class Odd(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ConfigError, match="Odd cannot be exported by torch.export: "):
        Deployment(Odd(), torch.ones(2, 3)).save("odd", onnx=False)
    data = digits(2)
    federation = trained(client(FedAvg), data)
    with pytest.raises(ConfigError, match=r"There is no client 7; there are 0, 1\."):
        deployment(federation, data, 7)


class Forward(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.net, self.own = nn.Linear(3, 1), forward

    def forward(self, x):
        return self.own(self.net(x))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (L.LightningModule(), r'LightningModule cannot be exported: .*does not run: .*"forward"'),
        (Forward(lambda x: {"logits": x}), "Forward cannot be exported: its forward returns a dict"),
        (Forward(lambda x: x.reshape(7, 7)), "Forward cannot be exported: its forward does not run"),
    ],
)
def test_a_forward_that_gives_no_tensor_is_told_before_anything_is_written(tmp_path, network, said):
    with pytest.raises(ConfigError, match=said):
        Deployment(network, torch.ones(2, 3)).save(tmp_path / "export", onnx=False)
    assert not (tmp_path / "export").exists()


def test_labels_are_not_those_of_a_single_logit_and_the_network_stays_as_it_is(tmp_path):
    network = nn.Linear(3, 1)
    Deployment(network, torch.ones(2, 3), labels=["no", "yes"]).save(tmp_path, onnx=False)
    assert json.loads((tmp_path / "model.json").read_text())["labels"] is None
    assert "## Labels" not in (tmp_path / "README.md").read_text()
    assert network.training


@with_onnx
def test_a_format_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr("lit_pfl.export.deployment.save_onnx", lambda program, path: Path(path).write_bytes(b""))
    monkeypatch.setattr("lit_pfl.export.deployment.run_onnx", lambda path, inputs: inputs * 1.001)
    with pytest.raises(ConfigError, match=r"model\.onnx does not compute what the model does: it is off by 0\.00"):
        Deployment(nn.Identity(), torch.ones(2, 3)).save("model")


@pytest.mark.seconds
@with_onnx
def test_a_model_that_has_no_onnx_is_told_in_one_line(tmp_path):
    network = Forward(lambda x: torch.linalg.eigvalsh(x[:, None] * x[..., None]))
    with pytest.raises(
        ConfigError, match=r"^Forward cannot be written as ONNX by PyTorch .*; or do without it, --no-onnx\.$"
    ):
        Deployment(network, torch.randn(2, 3)).save(tmp_path / "export")
    assert not (tmp_path / "export" / "model.onnx").exists()
    assert Deployment(network, torch.randn(2, 3)).save(tmp_path / "export", onnx=False)


@with_onnx
def test_without_the_packages_one_line_says_which(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ConfigError, match=r"ONNX needs onnxscript: pip install 'lit-pfl\[export\]'"):
        Deployment(nn.Identity(), torch.ones(2, 3)).save("model")
    assert not Path("model").exists()


@pytest.mark.seconds
def test_on_the_command_line(capsys):
    assert typed(capsys, "fit", *TINY, "--trainer.max_epochs", "1").code == 0
    [run] = Path("runs").glob("*/*")
    before = contents(run)
    came = typed(capsys, "export", str(run), "--client", "1", "--no-onnx", "--to", "there")
    assert came.code == 0
    assert "Client 1's model: there" in came.out
    assert contents(run) == before
    card = Path("there/README.md").read_text()
    wanted = ("1", "test", "trained")  # the state in which the model is exported
    [row] = [row for row in rows(run / "clients.csv") if (row["client"], row["split"], row["state"]) == wanted]
    assert f"acc {float(row['acc']):.4f}" in card
    assert "- Method: SimFed\n- Data: Digits\n- Seed: 1\n" in card
    wrong = typed(capsys, "export", str(run), "--no-onnx", "--client", "9")
    assert (wrong.code, wrong.errors) == (2, ["lit-pfl: error: There is no client 9; there are 0, 1, 2."])
    assert contents(run) == before
    wrong = typed(capsys, "export", "nowhere", "--client", "0", "--no-onnx")
    assert wrong.errors == [
        "lit-pfl: error: nowhere has no config.yaml; give the folder of a run that `lit-pfl fit` has saved."
    ]


@pytest.mark.seconds
def test_a_run_of_a_cluster_that_is_no_more_and_without_numbers_of_samples_is_exported(capsys):
    assert typed(capsys, "fit", *TINY, "--trainer.max_epochs", "1").code == 0
    [run] = Path("runs").glob("*/*")
    config = yaml.safe_load((run / "config.yaml").read_text())
    ray = {"class_path": "lit_pfl.engines.Ray", "init_args": {"address": "127.0.0.1:1"}}
    config["federation"]["engine"] = ray
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    table = rows(run / "clients.csv")
    write_rows(run / "clients.csv", [{name: value for name, value in row.items() if name != "n"} for row in table])
    assert typed(capsys, "export", str(run), "--client", "1", "--no-onnx", "--to", "there").code == 0
    assert "(personalized:before, after round 1)" in Path("there/README.md").read_text()
