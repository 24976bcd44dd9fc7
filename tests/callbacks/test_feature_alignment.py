"""What neurons have learnt, measured in plain Lightning projects and in federations."""

import csv
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_pfl import Federation
from lit_pfl.cli import main
from lit_pfl.data import PerClient
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import FeatureAlignment, RunLogger
from lit_pfl_callbacks.features.alignment import measure_features
from tiny import client, digits, trainer


class Classifier(L.LightningModule):
    """A LightningModule of somebody's: convolution, norm, an activation in place, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(nn.functional.relu(self.hidden(self.features(x).mean((2, 3)))))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def samples(n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 1, 6, 6, generator=generator), torch.arange(n) % 3)


def fit(tmp_path=None, epochs: int = 2, callback: L.Callback | None = None, **options) -> Classifier:
    torch.manual_seed(2)
    module = Classifier()
    logger = RunLogger(str(tmp_path), name="", version="run") if tmp_path else False
    fitting = trainer(epochs, callbacks=[callback] if callback else [], logger=logger, **options)
    fitting.fit(module, DataLoader(samples(), batch_size=8, shuffle=True))
    return module


def test_preferences_are_those_of_one_sample_after_another():
    module = Classifier().eval()
    module.features[1].running_mean.uniform_(-1, 1)
    data = samples(10)
    expected = {"features.0": torch.zeros(4, 3), "hidden": torch.zeros(5, 3)}
    for image, label in data:
        image, c = image[None], int(label)
        normed = nn.functional.relu(module.features[1](module.features[0](image)).detach()).requires_grad_()
        hidden = module.hidden(normed.mean((2, 3)))
        logits = module.head(nn.functional.relu(hidden))
        at = torch.autograd.grad(logits[0, c], [normed, hidden])
        for total, value, gradient in zip(expected.values(), [normed, hidden], at, strict=True):
            total[:, c] += (value * gradient).flatten(2).sum(-1)[0] if value.dim() > 2 else (value * gradient)[0]
    found = measure_features(module, DataLoader(data, batch_size=4))
    assert list(found) == list(expected)
    for name, preferences in expected.items():
        torch.testing.assert_close(found[name], preferences.detach(), rtol=1e-4, atol=1e-5)


def test_layers_that_do_not_train_are_measured_too():
    module, batches = Classifier(), DataLoader(samples(10), batch_size=4)
    expected = measure_features(module, batches)
    module.requires_grad_(False)
    assert measure_features(module, batches).keys() == expected.keys()
    for name, preferences in measure_features(module, batches).items():
        torch.testing.assert_close(preferences, expected[name])


def test_a_plain_project_gets_a_file(tmp_path):
    callback = FeatureAlignment(every_n_epochs=2)
    fit(tmp_path, 3, callback)
    rows = list(csv.DictReader((tmp_path / "run" / "features.csv").open()))
    assert [(row["epoch"], row["layer"], row["neurons"]) for row in rows] == [
        (epoch, layer, n) for epoch in "23" for layer, n in (("features.0", "4"), ("hidden", "5"))
    ]
    assert all(0 <= float(row["total_variance"]) <= 1 for row in rows)
    assert all(len(row["top_classes"].split()) == int(row["neurons"]) for row in rows)
    assert callback.depth in (1, 2)


def test_another_fit_of_the_same_callback_has_a_file_of_its_own(tmp_path):
    callback = FeatureAlignment()
    for name in ("one", "two"):
        fit(tmp_path / name, callback=callback)
    one, two = (tmp_path / name / "run" / "features.csv" for name in ("one", "two"))
    assert one.read_text() == two.read_text()


def test_training_goes_on_as_if_nobody_had_looked():
    watched, alone = fit(callback=FeatureAlignment(every_n_epochs=1)).state_dict(), fit().state_dict()
    assert all(torch.equal(watched[name], tensor) for name, tensor in alone.items())


def test_the_suggestion_is_said(notes):
    fit(callback=FeatureAlignment())
    [said] = [message for message in notes.messages if "depth=" in message]
    assert "1 features.0       4 0." in said
    assert "2 hidden           5 0." in said


def test_every_neurons_preferences_are_written_if_asked_for(tmp_path):
    module = fit(tmp_path, 1, FeatureAlignment(preferences=True, batches=9))
    rows = list(csv.DictReader((tmp_path / "run" / "preferences.csv").open()))
    assert [(row["layer"], row["neuron"]) for row in rows] == [
        *(("features.0", str(i)) for i in range(4)), *(("hidden", str(i)) for i in range(5))
    ]  # fmt: skip
    measured = torch.cat(list(measure_features(module, DataLoader(samples(), batch_size=8)).values())).clamp(min=0)
    shares = torch.tensor([[float(row[f"class_{c}"]) for c in range(3)] for row in rows])
    torch.testing.assert_close(shares, measured / measured.sum(1, keepdim=True).clamp(min=1e-30), rtol=1e-3, atol=1e-4)


def test_every_client_of_a_federation_is_measured(tmp_path):
    federation = Federation(client(FedAvg), seed=1, threads=1)
    callback = FeatureAlignment()
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(2, callbacks=[callback], logger=logger).fit(federation, datamodule=digits(3))
    rows = list(csv.DictReader((tmp_path / "run" / "features.csv").open()))
    assert [(row["epoch"], row["client"], row["position"]) for row in rows] == [
        ("2", k, position) for k in "012" for position in "1"
    ]


class Streams(L.LightningDataModule):
    """Validation data without a length, and labels of one byte."""

    num_classes = 3

    def train_dataloader(self):
        x, labels = samples().tensors
        return DataLoader(TensorDataset(x, labels.byte()), batch_size=8)

    def val_dataloader(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter([(x, label.byte()) for x, label in samples()])

        return DataLoader(Stream(), batch_size=8)


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_streams_of_validation_data(tmp_path):
    stopping, own = EarlyStopping("val/loss"), {"callbacks": [EarlyStopping("val_loss")]}
    federation = Federation(FedAvg(learner=Validated()), seed=1, threads=1, client_trainer=own)
    fitting = trainer(
        2, callbacks=[FeatureAlignment(), stopping], logger=RunLogger(str(tmp_path), name="", version="r")
    )
    fitting.fit(federation, datamodule=PerClient([Streams(), Streams()]))
    assert {row["client"] for row in csv.DictReader((tmp_path / "r" / "features.csv").open())} == {"0", "1"}


@pytest.mark.seconds
def test_from_the_command_line(tmp_path):
    small = ["--config", str(Path(__file__).parents[1] / "conf/tiny.yaml")]
    main(["fit", *small, "--trainer.callbacks+=FeatureAlignment", "--trainer.callbacks.batches=1",
          f"--trainer.logger.save_dir={tmp_path}"])  # fmt: skip
    assert len(list(tmp_path.glob("*/version_0/features.csv"))) == 1


@pytest.mark.seconds
def test_a_damaged_file_is_refused_before_a_round_is_computed(tmp_path, capsys):
    path = tmp_path / "run/features.csv"
    path.parent.mkdir()
    path.write_text("no,epoch\n1,one\n")
    small = ["--config", str(Path(__file__).parents[1] / "conf/tiny.yaml")]
    with pytest.raises(SystemExit):
        main(["fit", *small, "--trainer.callbacks+=FeatureAlignment", f"--folder={path.parent}"])
    printed = capsys.readouterr()
    assert "features.csv: line 2 has 'one' as 'epoch', which must be a number" in printed.err
    assert "round 1/" not in printed.out


class Images(Classifier):
    def forward(self, x):
        return self.features(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()


def test_what_is_no_classifier_is_refused():
    for module, data, words in ((Images(), samples(), "logits"), (Classifier(), samples().tensors[0], "labels")):
        with pytest.raises(MisconfigurationException, match=words):
            measure_features(module, DataLoader(data, batch_size=4))
    alone = torch.nn.Linear(5, 3)
    with pytest.raises(MisconfigurationException, match="Linear has no layer before its classifier"):
        measure_features(alone, [(torch.ones(2, 5), torch.tensor([0, 1]))])
    with pytest.raises(MisconfigurationException, match="batches=0"):
        FeatureAlignment(batches=0)


def test_a_trial_run_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = FeatureAlignment(preferences=True)
    fit(tmp_path, callback=monitor, fast_dev_run=True)
    assert monitor.rows
    assert not list(tmp_path.rglob("*.csv"))


def test_layers_with_parametrizations_are_measured_too():
    module, batches = Classifier().eval(), DataLoader(samples(10), batch_size=4)
    expected = list(measure_features(module, batches))
    nn.utils.parametrizations.spectral_norm(module.hidden)
    nn.utils.parametrizations.weight_norm(module.features[0])
    assert list(measure_features(module, batches)) == expected == ["features.0", "hidden"]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_batches_are_of_the_trainer_s_precision(precision):
    monitor, plain = FeatureAlignment(), FeatureAlignment()
    fit(callback=monitor, precision=precision)
    fit(callback=plain)
    assert torch.get_default_dtype() is torch.float32
    for row, expected in zip(monitor.rows, plain.rows, strict=True):
        assert row["layer"] == expected["layer"]
        assert row["total_variance"] == pytest.approx(expected["total_variance"], abs=0.2)


def test_batches_go_through_the_module_s_transfer_hooks(monkeypatch):
    """Somebody's batches are mappings, and become pairs on the device; what is trained on is augmented there."""
    stages = []

    def after(self, batch, dataloader_idx):
        stages.append(self.trainer.state.stage.value)
        return batch["x"], batch["y"]

    monkeypatch.setattr(Classifier, "on_before_batch_transfer", lambda self, b, i: {"x": b[0], "y": b[1]})
    monkeypatch.setattr(Classifier, "on_after_batch_transfer", after)
    monitor = FeatureAlignment(batches=2)
    fit(epochs=1, callback=monitor)
    assert [row["layer"] for row in monitor.rows] == ["features.0", "hidden"]
    assert stages == ["train"] * 5 + ["validate"] * 2
