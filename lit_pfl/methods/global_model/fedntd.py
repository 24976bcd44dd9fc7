"""FedNTD: what the global model says of the classes that a sample is not of is kept."""

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.methods.knowledge.fml import divergence


class FedNTD(Classifying):
    """Federated averaging of clients that distil the received model's predictions for all but the true class.

    To its loss a client adds ``beta * tau^2 * KL(q_t || q)``, the mean over the batch, where q is the softmax of the
    logits at temperature tau without the one of the sample's own class, and q_t that of the received model, frozen and
    in evaluation mode. The authors' code has no ``tau^2``, which is 1 by default.

    Args:
        beta: strength of the term; 0 is FedAvg.
        tau: temperature.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Lee et al. 2022, Algorithm 1.
    """

    needs_automatic = "adds a term to the loss"
    needs_labels = "leaves out the sample's own class"
    labels_in_steps_only = True

    shares = EVERYTHING

    def __init__(self, beta: NonNegativeFloat = 1.0, tau: PositiveFloat = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta, self.tau = beta, tau

    def begin_round(self) -> None:
        if self.beta:
            self.received = {name: tensor.clone() for name, tensor in self.network_tensors().items()}

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.beta:
            return super().objective(batch, batch_idx)
        teacher = self.call_frozen(self.received, batch, batch_idx).logits
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        labels = self.targets(batch)
        term = divergence(*(without_true(z, labels) / self.tau for z in (teacher, seen.logits)))
        return loss + self.beta * self.tau**2 * term


def without_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B, C - 1) logits without those of the labels' classes.

    Args:
        logits: (B, C).
        labels: (B,) int64.
    """
    others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], False)
    return logits[others].view(len(logits), -1)
