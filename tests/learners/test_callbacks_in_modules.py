"""Callbacks that a module contains, as anomalib's metrics and transforms: their hooks are called where it is scored."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.methods import Ditto, FedAvg
from lit_pfl_callbacks.tensors import tensors_of
from tiny import Learner, assert_equal, trainer

HOOKS: list[str] = []


class Scales(nn.Module, L.Callback):
    """Changes batches in place before a step sees them."""

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        assert trainer is pl_module.trainer
        batch[0].mul_(10)

    on_predict_batch_start = on_test_batch_start = on_validation_batch_start


class Scores(nn.Module, L.Callback):
    """Takes the mean of what the steps return, and logs it like a module."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.register_buffer("batches", torch.tensor(0), persistent=False)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.mean.update(outputs)
        self.batches += 1

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.log("mean", self.mean)
        self.log_dict({"batches": self.batches.float()})

    on_test_batch_end, on_test_epoch_end = on_validation_batch_end, on_validation_epoch_end

    def on_predict_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        HOOKS.append("on_predict_end")


class Outside(L.Callback):
    """One that the module makes, but that is no part of it."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        raise AssertionError


class Module(Learner):
    def __init__(self, callbacks: Any = None) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 1), lr=0.01)
        self.scales, self.scores, self.others = Scales(), Scores(), callbacks or []

    def configure_callbacks(self):
        return [self.scales, self.scores, *self.others]

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        return batch[0].mean()

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[0].mean(1)

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        HOOKS.append("on_predict_batch_end")


class Site(L.LightningDataModule):
    def __init__(self, client: int) -> None:
        super().__init__()
        self.rows = TensorDataset(torch.full((6, 2), 1.0 + client))

    def train_dataloader(self):
        return DataLoader(self.rows, 2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_what_they_compute_is_the_module_s_score(method):
    federation = Federation(method(learner=Module()), seed=1)
    fitting, data = trainer(2), PerClient(Site, num_clients=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not called")
        fitting.fit(federation, datamodule=data)
    for split in ("val", "test"):
        assert fitting.callback_metrics[f"{split}/mean"] == 15
        assert fitting.callback_metrics[f"{split}/batches"] == 3  # of the former round's none is left
    before = [tensors_of(client) for client in federation.clients.values()]
    HOOKS.clear()
    _, answers = fitting.predict(federation, datamodule=data)
    assert answers[1].tolist() == [20.0] * 6
    assert [*["on_predict_batch_end"] * 3, "on_predict_end"] * 2 == HOOKS
    assert_equal([tensors_of(client) for client in federation.clients.values()], before)


def test_of_others_a_warning_says_so():
    federation = Federation(FedAvg(learner=Module([Outside()])), seed=1)
    with pytest.warns(UserWarning, match=r"Outside\.on_validation_end is not called"):
        trainer(1).fit(federation, datamodule=PerClient(Site, num_clients=1))
    assert federation.trainer.callback_metrics["val/mean"] == 10
