"""MOON: model-contrastive federated learning."""

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.nn import Memory


class MOON(Classifying):
    """Federated averaging of clients whose features stay near the received model's and away from their last ones.

    With features q of the network in training, q_g of the received one and q_b of the one that this client trained
    last, a client minimizes its loss plus ``mu`` times the mean over the batch of ``-log (e^(cos(q, q_g) / tau) /
    (e^(cos(q, q_g) / tau) + e^(cos(q, q_b) / tau)))``. Both others are frozen and in evaluation mode. In a client's
    first round there is no last one, so no term: with the received model in its place its gradient would be zero. In
    the authors' code a client that trains for the first time in a later round has its initial network there.

    Features are what goes into the head. The authors' networks have a projection of two layers there, which is averaged
    with the rest: put one into the network. The task need not be a classification.

    Args:
        mu: strength of the term; 0 is FedAvg. The paper tries 0.1, 1, 5 and 10: 5 is best on CIFAR-10, 1 on CIFAR-100
            and Tiny-ImageNet.
        tau: temperature.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module.

    Source:
        Li et al. 2021 (Model-Contrastive Federated Learning), Eq. 3 and Algorithm 1.
    """

    needs_automatic = "adds a contrastive term to the loss"
    needs_labels = ""

    shares = EVERYTHING

    previous: Memory
    has_previous: Tensor

    def __init__(self, mu: NonNegativeFloat = 5.0, tau: PositiveFloat = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mu, self.tau = mu, tau

    def configure_state(self) -> None:
        if self.mu:
            self.previous = Memory(self.network_tensors())
            self.register_buffer("has_previous", torch.tensor(False))

    def begin_round(self) -> None:
        if self.mu and self.has_previous:
            self.received = {name: tensor.clone() for name, tensor in self.network_tensors().items()}

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.received:
            return super().objective(batch, batch_idx)
        others = (self.received, dict(self.previous.items()))
        near, away = (self.call_frozen(network, batch, batch_idx).features for network in others)
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        return loss + self.mu * contrast(seen.features, near, away, self.tau)

    def end_round(self) -> None:
        if self.mu:
            self.previous.copy_(self.network_tensors())
            self.has_previous.fill_(True)


def contrast(features: Tensor, near: Tensor, away: Tensor, tau: float) -> Tensor:
    """Return MOON's contrastive loss, the mean over the batch.

    Args:
        features: (B, d), to be near the first and away from the second.
        near: (B, d).
        away: (B, d).
        tau: temperature.
    """
    cosines = torch.stack([nn.functional.cosine_similarity(features, other, dim=1) for other in (near, away)], 1)
    return -(cosines / tau).log_softmax(1)[:, 0].mean()
