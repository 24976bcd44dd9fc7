"""How many CPU threads clients compute with."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.flop_counter import FlopCounterMode

from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, call_hook, recorded, size_of, training_loss, unchanged, without_gradients
from lit_pfl.learners.scoring import mean_loss, transferred
from lit_pfl.learners.trying import on_first
from lit_pfl.randomness import fixed_draws


def choose_threads(
    learner: L.LightningModule,
    batches: Iterable[Any],
    batch_size: int | None,
    stacked: int = 1,
    most: int | None = None,
) -> int:
    """Count one batch's work: a further thread for every 20 million operations of a forward pass.

    As many as there are for a learner that cannot do it without a Trainer and has none.

    Args:
        learner: any client's.
        batches: batches for it, of which the first that it can do with is counted.
        batch_size: samples of a training batch; by default those of the counted one.
        stacked: how many batches make a step.
        most: how many threads there are; by default PyTorch's own number.

    Raises:
        ConfigError: when a learner that has a Trainer cannot do with such batches.
    """
    most = torch.get_num_threads() if most is None else most

    def threads(batch: Any) -> int:
        try:
            with FlopCounterMode(display=False) as counter:
                mean_loss(learner, [batch])
        except ConfigError:
            raise
        except Exception:
            if learner._trainer is None or (error := _error_of(learner, batch)) is None:
                return most
            raise error from None
        operations = counter.get_total_flops() / size_of(batch) * (batch_size or size_of(batch)) * stacked
        return max(1, min(most, round(operations / 2e7)))

    return on_first(learner, batches, threads)


def _error_of(learner: L.LightningModule, example: Any) -> Exception | None:
    """Return the step's own error, without the counter, which fails where a step takes gradients, in training mode.

    Detectors, such as torchvision's, have losses in training mode only. A learner that steps its optimizers itself
    finds gradients, of zeros, which it may read between its steps.
    """
    try:
        mean_loss(learner, [example])
    except Exception:
        weights = [*learner.parameters()]
        with unchanged(learner), without_gradients(weights), recorded(learner), fixed_draws(0):
            for weight in () if learner.automatic_optimization else weights:
                weight.grad = torch.zeros_like(weight)
            try:
                for hook, given in (("on_train_epoch_start", ()), ("on_train_batch_start", (example, 0))):
                    if is_overridden(hook, learner):
                        call_hook(learner, hook, *given)  # which may set what the step reads
                training_loss(learner.train(), transferred(learner, example), 0)
            except SkipBatch:
                return None
            except Exception as error:
                return error
    return None


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """Compute with this many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ReportsBusyCores(L.Callback):
    """Reports once, after a round, that other processes keep cores busy, so that threads wait for each other.

    Beside one other process, a small network's step on two threads of two cores may take a hundred times as long.
    """

    def __init__(self) -> None:
        self.reported = not hasattr(os, "getloadavg")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compare the load of the last minute with the number of cores."""
        threads, cores = pl_module.threads, os.cpu_count() or 1
        elsewhere = pl_module.device.type != "cpu" or pl_module.engine.cores is not None
        if self.reported or threads == 1 or elsewhere or os.getloadavg()[0] < cores + 0.3:
            return
        self.reported = True
        rank_zero_info(
            f"Other processes keep cores of this machine busy, so that {threads} threads wait for each other. "
            "federation.threads=1 is faster then."
        )


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, up to 64 MB, instead of handing it back to the system at once.

    A small network's batch otherwise gives some megabytes back and faults them in again, page by page: a tenth of the
    time of a CNN's training on two threads. The GNU library keeps as much as twice the largest block that was ever
    freed, and blocks up to 32 MB count; so one is taken here and freed, without ever being touched. Where another
    library is in use this does nothing.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)
