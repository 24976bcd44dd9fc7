"""How many CPU threads clients compute with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_pfl.errors import WRONG, ConfigError
from lit_pfl.learners import SkipBatch, recorded, size_of, training_loss, unchanged, without_gradients
from lit_pfl.learners.scoring import mean_loss, transferred
from lit_pfl.nn import composed_layers
from lit_pfl.randomness import fixed_draws


def choose_threads(
    learner: L.LightningModule, example: Any, batch_size: int | None, stacked: int = 1, most: int | None = None
) -> int:
    """Count one batch's work: a further thread for every 20 million operations of a forward pass.

    As many as there are for a learner that cannot do it without a Trainer and has none.

    Args:
        learner: any client's.
        example: a batch for it.
        batch_size: samples of a training batch; by default those of the example.
        stacked: how many batches make a step.
        most: how many threads there are; by default PyTorch's own number.

    Raises:
        ConfigError: when a learner that has a Trainer cannot do with such a batch.
    """
    most = torch.get_num_threads() if most is None else most
    try:
        with FlopCounterMode(display=False) as counter:
            mean_loss(learner, [example])
    except ConfigError:
        raise
    except WRONG as error:
        if learner._trainer is None or _works(learner, example):
            return most
        name, composed = type(learner).__name__, next(composed_layers(learner), None)
        hint = "" if composed is None else f" (its {composed[0]} is a {type(composed[1]).__name__} under this method)"
        raise ConfigError(
            f"model.learner: {name} has no training loss for a batch of this data, {_described(example)}{hint}: "
            f"{type(error).__name__}: {error}"
        ) from error
    operations = counter.get_total_flops() / size_of(example) * (batch_size or size_of(example)) * stacked
    return max(1, min(most, round(operations / 2e7)))


def _works(learner: L.LightningModule, example: Any) -> bool:
    """Say whether the step works without the counter, which fails where a step takes gradients, or in training mode.

    Detectors, such as torchvision's, have losses in training mode only. A learner that steps its optimizers itself
    finds gradients, of zeros, which it may read between its steps.
    """
    try:
        mean_loss(learner, [example])
    except WRONG:
        weights = [*learner.parameters()]
        with unchanged(learner), without_gradients(weights), recorded(learner), fixed_draws(0):
            for weight in () if learner.automatic_optimization else weights:
                weight.grad = torch.zeros_like(weight)
            try:
                training_loss(learner.train(), transferred(learner, example), 0)
            except SkipBatch:
                return True
            except WRONG:
                return False
    return True


def _described(batch: Any) -> str:
    """Return a batch's shapes, for a message."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_described(part)}" for name, part in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(_described, batch)) + ")"
    return type(batch).__name__


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """Compute with this many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, up to 64 MB, instead of handing it back to the system at once.

    A small network's batch otherwise gives some megabytes back and faults them in again, page by page: a tenth of the
    time of a CNN's training on two threads. The GNU library keeps as much as twice the largest block that was ever
    freed, and blocks up to 32 MB count; so one is taken here and freed, without ever being touched. Where another
    library is in use this does nothing.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)
