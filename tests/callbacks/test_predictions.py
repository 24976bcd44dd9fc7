"""Predictions of every test sample as a file."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from callbacks.plain import rows, trainer
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import Predictions


def predicted(folder, outputs, labels=(0, 1, 1), times=1):
    module = SimpleNamespace(test_samples=lambda client: (torch.tensor([7, 8, 9]), torch.tensor(labels)))
    callback, predicting = Predictions(), trainer(folder, 1, [])
    for _ in range(times):
        callback.on_predict_start(predicting, module)
        callback.on_predict_batch_end(predicting, module, {4: outputs}, [4], 0)
        callback.on_predict_end(predicting, module)
    return rows(folder / "run" / "predictions.csv")


def test_a_second_look_takes_the_place_of_the_first(tmp_path):
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    found = predicted(tmp_path, logits, times=2)
    assert [row["sample"] for row in found] == ["7", "8", "9"]
    assert [row["prediction"] for row in found] == ["0", "1", "0"]
    assert float(found[2]["probability"]) == pytest.approx(float(logits.softmax(1)[2, 0]), abs=1e-6)


def test_a_single_logit_is_no_class(tmp_path):
    found = predicted(tmp_path, torch.tensor([[-1.5], [0.25], [3.0]]))
    assert [(row["prediction"], row["probability"]) for row in found] == [("-1.5", ""), ("0.25", ""), ("3.0", "")]


def test_several_numbers_next_to_one_that_is_no_class_are_kept(tmp_path):
    found = predicted(tmp_path, torch.tensor([[1.0, 2.0]] * 3), labels=(0.5, 1.5, 2.5))
    assert [(row["label"], row["prediction"]) for row in found] == [(f"{x}.5", "[1.0, 2.0]") for x in range(3)]


class Numbers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_of_rows_of_several_lengths_are_kept_as_they_are(tmp_path):
    class Words(Numbers):
        def predict_step(self, batch, batch_idx):
            return torch.full((len(batch[0]), 2 + batch_idx), batch_idx)

    samples = TensorDataset(torch.randn(4, 3), torch.zeros(4, 1))
    data = PerClient([L.LightningDataModule.from_datasets(samples, samples, samples, batch_size=2)])
    predicting = trainer(tmp_path, 1, [Predictions()])
    predicting.predict(Federation(FedAvg(learner=Words())), datamodule=data)
    words = [row["prediction"] for row in rows(tmp_path / "run" / "predictions.csv")]
    assert words == ["[0, 0]", "[0, 0]", "[1, 1, 1]", "[1, 1, 1]"]


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_a_regression_s_targets_are_labels(tmp_path, shape):
    targets = torch.arange(5.0).repeat(2)[: torch.Size(shape).numel()].reshape(shape)
    samples = TensorDataset(torch.randn(5, 3), targets)
    data = PerClient([L.LightningDataModule.from_datasets(samples, samples, samples, batch_size=2)] * 2)
    predicting = trainer(tmp_path, 1, [Predictions()])
    predicting.predict(Federation(FedAvg(learner=Numbers())), datamodule=data)
    labels = [row["label"] for row in rows(tmp_path / "run" / "predictions.csv")]
    assert labels == (["0.0", "1.0", "2.0", "3.0", "4.0"] if shape != (5, 2) else [""] * 5) * 2


@pytest.mark.parametrize(
    "outputs",
    [[{"logits": torch.ones(3, 2)}], [(torch.ones(3, 2), torch.ones(3))], torch.ones(2, 2), [torch.tensor(1.0)], [0.5]],
)
def test_what_is_not_one_prediction_a_sample_is_told(tmp_path, outputs):
    with pytest.raises(MisconfigurationException, match="Client 4: .* for 3 samples"):
        predicted(tmp_path, outputs)
