"""kNN-Per: a global model, and the training samples that are nearest in its feature space."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import log_mixture
from lit_pfl.randomness import fixed_order

GRID = [i / 10 for i in range(11)]


class KNNPer(Classifying):
    """Train as FedAvg does; in evaluation mix the model's prediction with that of the client's nearest samples.

    A client keeps the d features h_j and labels y_j of its training data. With the k of them that are nearest to a
    sample's features h, ``p(c)`` is the share of class c among them, weighted by ``exp(-|h - h_j|^2 / (d scale))``.
    What is evaluated is ``lam * p + (1 - lam) * softmax(z)``: its logarithm takes the place of the logits, so that loss
    and accuracy come from the learner's own steps. Nothing more is sent than by FedAvg, and nothing is kept: features
    are taken again, from the model that is evaluated.

    The authors' code mixes p with logits by default, and chooses lam on the test data.

    Args:
        k: number of neighbors.
        lam: the weight of the neighbors. ``val``: of 0, 0.1, ..., 1 the one with the best accuracy on the client's
            validation data, the smallest of several; without validation data 0.5.
        scale: of distances, in the exponent.
        capacity: the share of the training data that is kept, or above 1 their number, drawn at random.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Marfoq et al. 2022.
    """

    needs_automatic = "reads what goes into the head in one step of the learner"
    needs_labels = "keeps the class labels of its training data"

    shares = EVERYTHING

    def __init__(
        self,
        k: PositiveInt = 10,
        lam: float | Literal["val"] = "val",
        scale: PositiveFloat = 1.0,
        capacity: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if lam != "val" and not 0 <= lam <= 1:
            raise ConfigError(f"model.lam={lam}: give a weight from 0, the model alone, to 1, the neighbors; or val.")
        self.k, self.lam, self.scale, self.capacity = k, lam, scale, capacity

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Mix the predictions of the model and of the nearest samples."""
        if self.lam == 0:
            yield self.learner
            return
        neighbours = self._neighbours()
        neighbours.weight = self._best_weight(neighbours) if self.lam == "val" else self.lam
        with self.at_head(logits=neighbours):
            yield self.learner

    def _neighbours(self) -> "Neighbours":
        features, labels = self.all_embedded()
        kept = min(len(labels), max(1, round(self.capacity * len(labels) if self.capacity <= 1 else self.capacity)))
        if kept < len(labels):
            drawn = fixed_order(len(labels), self.spec.client_id)[:kept]
            features, labels = features[drawn.to(features.device)], labels[drawn.to(labels.device)]
        return Neighbours(features, nn.functional.one_hot(labels, self.num_logits), self.k, self.scale)

    def _best_weight(self, neighbours: "Neighbours") -> float:
        right, n = torch.zeros(len(GRID), dtype=torch.float64), 0
        for features, logits, labels in self.embedded(self.data.val if self.data is not None else ()):
            shares = neighbours.shares_of(features)
            for i, weight in enumerate(GRID):
                right[i] += float((log_mixture(logits, shares, weight).argmax(1) == labels).sum())
            n += len(labels)
        return GRID[int(right.argmax())] if n else 0.5


class Neighbours(nn.Module):
    """Mixes the class shares of the nearest samples into logits.

    Args:
        features: (n, d) of the samples.
        labels: (n, C), one-hot.
        k: how many count.
        scale: of distances.

    Attributes:
        weight: of the neighbors in the mixture.
    """

    features: Tensor
    labels: Tensor

    def __init__(self, features: Tensor, labels: Tensor, k: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("labels", labels.to(features.dtype))
        self.k, self.scale, self.weight = min(k, len(features)), scale, 1.0

    def shares_of(self, features: Tensor) -> Tensor:
        """Return the (B, C) weighted shares of the classes among the nearest samples of (B, d) features."""
        features = features.to(self.features.dtype)
        # one way for every number of features, so that a network of it can be exported
        apart = torch.cdist(features, self.features, compute_mode="use_mm_for_euclid_dist")
        distances, nearest = apart.square().topk(self.k, largest=False)
        weights = (-distances / (features.shape[1] * self.scale)).softmax(1)  # also where all of exp(-d) would be 0
        return (weights[:, :, None] * self.labels[nearest]).sum(1)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return (B, C) log-probabilities of the mixture."""
        return log_mixture(logits, self.shares_of(features).to(logits.dtype), self.weight)
