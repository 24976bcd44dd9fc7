"""FedRoD: a generic head trained as if classes were balanced, and a personal one on top of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import AddLogits, linear_layers

#: logits of classes that a client has no samples of: no probability, and no infinity where a learner smooths its labels
ABSENT = -1e4


class FedRoD(Classifying):
    """Average a generic model that is trained with balanced softmax, and add a personal head that is not averaged.

    With features h and logits z of the generic head, n_c training samples of class c at this client, and the personal
    head's logits p(h), a client minimizes ``CE(z + gamma log n, y) + CE(stop(z) + p(stop(h)), y)``, where stop cuts the
    gradient: neither loss changes the other's parameters. The first of them is the learner's own loss of its changed
    logits. What is evaluated is ``z + p(h)``.

    The balanced softmax uses ``log (n_c / max n)``: the softmax is the same, and with equal counts the generic part is
    FedAvg's, bit for bit. Classes without samples get no probability and no gradient.

    Args:
        gamma: exponent of the class counts in the balanced softmax; 0 is FedAvg's softmax.
        start: how the personal head starts: with a last layer of ``zero``, so that the personalized model starts as the
            generic one, or as a ``copy`` of the generic head, as PFLlib has it. The authors published no code.
        kwargs: see :class:`~lit_pfl.Client`. Gradient clipping, if it is asked for, is of both parts together.

    Raises:
        ConfigError: when the learner has no head module or one that cannot start at zero, or the data no class labels.

    Source:
        Chen and Chao 2022, FedRoD with a linear personal head.
    """

    needs_automatic = "adds the loss of a personal head"
    needs_labels = "counts the samples of every class"

    shares = EVERYTHING
    calls_heads = True

    def __init__(self, gamma: NonNegativeFloat = 1.0, start: Literal["zero", "copy"] = "zero", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gamma, self.start = gamma, start

    def configure_state(self) -> None:
        own = copy.deepcopy(self.head_module)
        if self.start == "zero":
            silence([own, *linear_layers(own)][-1])
        self.extra = nn.ModuleDict({"own": own})

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the balanced loss of the generic model and of the personal head's loss."""
        prior = log_prior(self.class_counts, self.gamma).to(self.device)
        with self.at_head(logits=lambda h, z: z + prior.to(z.dtype)) as seen:
            loss = super().objective(batch, batch_idx)
        personal = seen.logits.detach() + self.extra["own"](seen.features.detach())
        return loss + nn.functional.cross_entropy(personal, self.targets(batch))

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Add the personal head's logits to the generic head's."""
        with self.at_head(logits=AddLogits(self.extra["own"])):
            yield self.learner


@torch.no_grad()
def silence(layer: nn.Module) -> None:
    """Let a linear layer give zeros, and still learn.

    Of a product of factors one is zero: with all of them at zero, none would have a gradient.

    Raises:
        ConfigError: when its weight is not zero for that.
    """
    own = dict(layer.named_parameters())
    added = [name for name in own if name.rpartition(".")[2] in ("bias", "mu")]
    first = [name for name in own if name not in added][:1]
    for name in (*added, *first):
        own[name].zero_()
    if isinstance(weight := getattr(layer, "weight", None), Tensor) and not (weight == 0).all():
        raise ConfigError(
            f"model.start=zero: the weight of the head's last layer, a {type(layer).__name__}, cannot be zero; give "
            "start=copy."
        )


def log_prior(counts: Tensor, gamma: float = 1.0) -> Tensor:
    """Return ``gamma * log (n_c / max n)``, (C,); ``ABSENT`` for classes without samples, unless gamma is 0.

    Args:
        counts: (C,) samples of every class.
        gamma: exponent of the counts.
    """
    if not gamma:
        return torch.zeros(len(counts))
    return (gamma * (counts / counts.max()).log()).clamp_min(ABSENT)
