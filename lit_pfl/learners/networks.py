"""Learners as networks by themselves."""

import copy

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.learners.classifier import ImageClassifier
from lit_pfl.lightning_internals import own_copy


def network_of(learner: L.LightningModule) -> nn.Module:
    """Return a copy of what computes a learner's ``forward``, in evaluation mode and without a Trainer.

    Of an image classifier that is its backbone, of any other learner all of it.
    """
    if isinstance(learner, ImageClassifier):
        return copy.deepcopy(learner.backbone).eval()
    network = own_copy(learner)
    network.trainer = None
    return network.eval()


class Mixture(nn.Module):
    """Two networks on the same input; what comes out is ``alpha * own + (1 - alpha) * common``.

    Args:
        own: a network.
        common: another one.
        alpha: a scalar, the weight of the first.
    """

    alpha: Tensor

    def __init__(self, own: nn.Module, common: nn.Module, alpha: Tensor) -> None:
        super().__init__()
        self.own, self.common = own, common
        self.register_buffer("alpha", alpha.detach().clone())
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mixture."""
        return torch.lerp(self.common(*inputs), self.own(*inputs), self.alpha)
