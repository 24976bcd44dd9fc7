"""What a training_step may return."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl import Client, Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, training_loss
from lit_pfl.methods import APFL, Ditto, FactorizedFL, FedAvg, FedSLR, PerFedAvg, Scaffold
from tiny import Learner, Site, trainer


class Returning(L.LightningModule):
    """Its step returns what is given."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def training_step(self, batch):
        return self.outputs


def loss_of(outputs: Any) -> torch.Tensor:
    return training_loss(Returning(outputs), (), 0)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (0.5, "a float;"),
        (torch.ones(3), r"a tensor of shape \(3,\);"),
        ({"mse": torch.ones(())}, "a dict without a 'loss';"),
        ({"loss": 0.5}, "a dict with a float as its 'loss';"),
        ([torch.ones(())], "a list;"),
    ],
)
def test_what_is_no_loss_is_told(outputs, said):
    with pytest.raises(ConfigError, match=f"^model.learner: its training_step returns {said} it must return the loss"):
        loss_of(outputs)


@pytest.mark.parametrize("outputs", [torch.ones(()), torch.ones(1), {"loss": torch.ones(()), "logits": torch.ones(3)}])
def test_losses(outputs):
    loss = loss_of(outputs)
    assert loss.item() == 1
    assert loss.shape == ()  # several are stacked, added and compared


class Detector(Learner):
    """Has losses in training mode only, as torchvision's detectors do; in evaluation it returns what it has found."""

    def __init__(self):
        super().__init__(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1))

    def training_step(self, batch, batch_idx):
        found = self(batch[:, None])
        return sum({"box": found.square().mean()}.values() if self.training else [{}].values())

    def validation_step(self, batch, batch_idx):
        self.log("found", self(batch[:, None]).mean())


def test_a_detector_s_losses():
    federation, boxes = Federation(FedAvg(learner=Detector()), seed=1), torch.arange(32.0).reshape(8, 4)
    trainer(1).fit(federation, datamodule=PerClient([Site(boxes, 4), Site(boxes, 4)]))
    assert federation.trainer.callback_metrics["train/loss"] > 0
    assert federation.clients[0].learner.head.num_batches_tracked == 2


def test_none_skips_the_batch():
    with pytest.raises(SkipBatch):
        loss_of(None)


class Telling(Learner):
    """Returns more than its loss, every other batch alone, and looks at what it returned when the batch is over."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3))
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits, "names": ["a"]} if batch_idx % 2 == 0 else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((batch_idx, outputs))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {}), (Scaffold, {}), (Ditto, {"lam": 0.1}), (FedSLR, {"lam": 1e-3, "mu": 1e-3}), (PerFedAvg, {}),
        (APFL, {}), (FactorizedFL, {}),
    ],
)  # fmt: skip
def test_what_a_step_returns_reaches_the_end_of_the_batch(method: type[Client], options):
    federation = Federation(method(learner=Telling(), **options), seed=0, threads=1)
    sites = [Site(TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), 8) for _ in range(2)]
    trainer(2).fit(federation, datamodule=PerClient(sites))
    for client in federation.clients.values():
        assert {batch_idx for batch_idx, _ in client.learner.seen} >= {0, 1}
        for batch_idx, outputs in client.learner.seen:
            assert outputs["loss"].numel() == 1
            assert not outputs["loss"].requires_grad
            assert set(outputs) == ({"loss", "logits", "names"} if batch_idx % 2 == 0 else {"loss"})
            assert batch_idx % 2 or (outputs["logits"].shape[1] == 3 and outputs["names"] == ["a"])
