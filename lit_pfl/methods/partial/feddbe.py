"""FedDBE: the bias of each client's domain, taken out of its features."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.nn import Memory

MEAN = "feature_mean"


class FedDBE(Classifying):
    """Federated averaging of networks whose features get a vector of the client's own before they go into the head.

    With features h, each client trains a vector r next to the averaged network, from zero, and never sends it: the head
    is given h + r. So that h itself holds what clients have in common, its mean stays near a global one: to the loss
    comes ``kappa * mean_d((m - m_g)^2 / 2)``, where m is a running mean over batches, ``m <- (1 - mu) m + mu mean(h)``,
    from zero in every round.

    The global mean m_g comes from the first round, in which clients train without r and without the term: the server
    averages their m by samples, throws their weights away and keeps m_g for ever. In the authors' code all clients take
    part in that round, here those that are chosen. The task need not be a classification.

    Args:
        kappa: strength of the term; 0 leaves it out.
        mu: momentum of the running mean; 1 is the mean of the batch. m_g then comes from every client's last batch of
            the first round alone, however few samples this has; less depends on it with a smaller mu, or without short
            batches (``drop_last``, as in the authors' code).
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module with a linear layer.

    Source:
        Zhang et al. 2023 (Eliminating Domain Bias), Algorithm 1.
    """

    needs_automatic = "adds a term to the loss"
    needs_one_process = "averages the features of its batches"
    needs_labels = ""

    shares = EVERYTHING
    reserved = (MEAN,)

    own: Memory
    common: Memory

    def __init__(self, kappa: NonNegativeFloat = 50.0, mu: ClosedUnitInterval = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kappa, self.mu = kappa, mu

    def configure_state(self) -> None:
        zeros = torch.zeros(self.num_features)
        self.extra = nn.ModuleDict({"bias": Shift(self.num_features)})
        self.own = Memory({MEAN: zeros})
        self.common = Memory({MEAN: zeros, "known": torch.tensor(False)})

    def configure_server(self) -> "FedDBEServer":
        return FedDBEServer()

    def upload(self) -> Payload:
        """Return the weights and the running mean of the features."""
        return super().upload().with_({MEAN: self.own[MEAN]})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        if MEAN in reply:
            self.common.copy_({MEAN: reply[MEAN], "known": torch.tensor(True)})
        super().download({name: tensor for name, tensor in reply.items() if name != MEAN})

    def begin_round(self) -> None:
        self.own.zero_()

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        known = bool(self.common["known"])
        with self.at_head(features=self.extra["bias"] if known else None) as seen:
            loss = super().objective(batch, batch_idx)
        mean = (1 - self.mu) * self.own[MEAN] + self.mu * seen.features.float().mean(0)
        self.own.copy_({MEAN: mean.detach()})
        if not known or not self.kappa:
            return loss
        return loss + self.kappa * ((mean - self.common[MEAN]).square() / 2).mean()

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Give the head the client's own vector too."""
        with self.at_head(features=self.extra["bias"]):
            yield self.learner


class Shift(nn.Module):
    """Adds a trained vector to (B, d) features.

    Args:
        size: d.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(size))

    def forward(self, features: Tensor) -> Tensor:
        """Return the sum."""
        return features + self.vector.to(features.dtype)


class FedDBEServer(Server):
    """Averages weights, but in the first round only the mean of the features, which it keeps.

    Attributes:
        feature_mean: (d,) m_g; None before the first round.
    """

    averages = means_only = True
    kept = ("feature_mean",)

    feature_mean: Tensor | None = None

    def is_averaged(self, name: str) -> bool:
        return name != MEAN

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        if self.feature_mean is None:
            weights = self.averaging_weights(round, uploads)
            self.feature_mean = self.average(uploads, weights, [MEAN])[MEAN]
        else:
            super().aggregate(round, uploads)

    def reply(self, client: int) -> Payload:
        if self.feature_mean is None:
            return self.model
        return self.model.with_({MEAN: self.feature_mean})
