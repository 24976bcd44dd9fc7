"""What a training_step may return."""

from typing import Any

import lightning as L
import pytest
import torch

from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, training_loss


class Returning(L.LightningModule):
    """Its step returns what is given."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def training_step(self, batch):
        return self.outputs


def loss_of(outputs: Any) -> torch.Tensor:
    return training_loss(Returning(outputs), None, 0)


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
    assert loss_of(outputs).item() == 1


def test_none_skips_the_batch():
    with pytest.raises(SkipBatch):
        loss_of(None)
