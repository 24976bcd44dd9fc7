"""Whether a learner can do with the data, seen before training."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import lightning as L

from lit_pfl.data.batches import described
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import mean_loss
from lit_pfl.nn import composed_layers

T = TypeVar("T")


def on_first(learner: L.LightningModule, batches: Iterable[Any], act: Callable[[Any], T]) -> T:
    """Return what comes of the first of some batches that a learner can do with.

    Args:
        learner: the learner.
        batches: a batch of one sample, and another one: of a single sample, steps may not have a variance, or pairs.
        act: what is done with a batch.

    Raises:
        ConfigError: when the learner can do with none of them. It is about the first, or about the last
            where that, a batch as in training, fails in another way.
    """
    failed: list[tuple[Any, Exception]] = []
    for batch in batches:
        try:
            return act(batch)
        except ConfigError:
            raise
        except Exception as error:
            failed.append((batch, error))
    same = type(failed[-1][1]) is type(failed[0][1])
    batch, reason = failed[0 if same else -1]
    name, composed = type(learner).__name__, next(composed_layers(learner), None)
    hint = "" if composed is None else f" (its {composed[0]} is a {type(composed[1]).__name__} under this method)"
    raise ConfigError(
        f"model.learner: {name} has no training loss for a batch of this data, {described(batch)}{hint}: "
        f"{type(reason).__name__}: {reason}"
    ) from reason


def try_step(learner: L.LightningModule, batches: Iterable[Any]) -> None:
    """Let a learner take a training step, which leaves it as it was; see :func:`on_first`."""
    on_first(learner, batches, lambda batch: mean_loss(learner, [batch]))
