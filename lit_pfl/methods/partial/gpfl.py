"""GPFL: global embeddings of classes, and features seen generically and personally at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import BODY
from lit_pfl.nn import Memory


class GPFL(Classifying):
    """Next to the body, embeddings of classes and a conditional layer are averaged; heads are each client's own.

    With features h, the conditional layer is ``cov(h, c) = ReLU(h * (gamma(c) + 1) + beta(c))``, gamma and beta a
    linear layer, ReLU and layer norm each. From its class embeddings E, (C, d), a client makes two conditions: generic,
    the mean over classes, and personal, the mean weighted by its own class shares. It minimizes its loss with ``cov(h,
    personal)`` instead of the head's input, plus, with ``g = cov(h, generic)``, the cross entropy of ``cos(g, E)`` and
    ``lam * |g - E'_y|_F``, the norm over the whole batch, where E' is E as it was received. What is evaluated has the
    head see ``cov(h, personal)``.

    Conditions come from the client's own trained E, before the received one takes its place; they are zero until a
    client has trained. Where all clients train in every round this is the authors' code. With clients that rest, the
    authors' code makes everybody's conditions again in every round, from the E that a client received a round before.

    Args:
        lam: strength of the norm; 0.0001 for a ResNet-18 and fastText.
        mu: weight decay of embeddings and conditional layer, besides the optimizer's own; 0 for a ResNet-18 and
            fastText.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module with a linear layer, or
            the data no class labels.

    Source:
        Zhang et al. 2023 (GPFL), Algorithm 1.
    """

    needs_automatic = "adds terms to the loss"
    needs_labels = "compares features with embeddings of their classes"
    needs_common_labels = "averages embeddings of classes"

    shares = BODY
    shared_extras = frozenset({"embeddings", "conditional"})

    conditions: Memory

    def __init__(self, lam: NonNegativeFloat = 0.01, mu: NonNegativeFloat = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam, self.mu = lam, mu
        self._received = torch.empty(0)

    def configure_state(self) -> None:
        d = self.num_features
        extra = nn.ModuleDict({"embeddings": nn.Embedding(self.num_logits, d), "conditional": Conditional(d)})
        self.extra = extra.to(self.head_dtype)
        zeros = torch.zeros(d, dtype=self.head_dtype)
        self.conditions = Memory({"generic": zeros, "personal": zeros, "trained": torch.tensor(False)})

    @property
    def _embeddings(self) -> nn.Parameter:
        table: Any = self.extra["embeddings"]
        return table.weight

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        if self.conditions["trained"]:
            embeddings, counts = self._embeddings, self.class_counts.to(self.device)
            shares = (counts / counts.sum())[:, None]
            made = {"generic": embeddings.mean(0), "personal": (shares * embeddings).sum(0)}
            self.conditions.copy_({**made, "trained": self.conditions["trained"]})
        super().download(reply)

    def begin_round(self) -> None:
        self._received = self._embeddings.detach().clone()

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head(features=Conditioned(self.extra["conditional"], self.conditions["personal"])) as seen:
            loss = super().objective(batch, batch_idx)
        generic, labels = self.extra["conditional"](seen.features, self.conditions["generic"]), self.targets(batch)
        cosines = nn.functional.normalize(generic) @ nn.functional.normalize(self._embeddings).T
        loss = loss + nn.functional.cross_entropy(cosines, labels)
        loss = loss + self.lam * torch.linalg.vector_norm(generic - self._received[labels])
        decay = self.mu / 2 * torch.stack([weight.square().sum() for weight in self.extra.parameters()]).sum()
        return loss + (decay - decay.detach())  # only the gradient counts, as that of an optimizer's weight decay

    def end_round(self) -> None:
        self._received = torch.empty(0)  # a sleeping client keeps no copy
        self.conditions["trained"].fill_(True)

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Give the head the features under the personal condition."""
        with self.at_head(features=Conditioned(self.extra["conditional"], self.conditions["personal"])):
            yield self.learner


class Conditional(nn.Module):
    """Scales and shifts features as a condition says.

    Args:
        size: d of features and condition.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size)) for _ in range(2))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Return ``ReLU(features * (gamma(condition) + 1) + beta(condition))``, (B, d), of a (d,) condition."""
        return (features * (self.gamma(condition) + 1) + self.beta(condition)).relu()


class Conditioned(nn.Module):
    """A conditional layer under one condition.

    Args:
        layer: a :class:`Conditional`.
        condition: (d,).
    """

    condition: Tensor

    def __init__(self, layer: nn.Module, condition: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("condition", condition)

    def forward(self, features: Tensor) -> Tensor:
        """Return the changed features."""
        return self.layer(features, self.condition)
