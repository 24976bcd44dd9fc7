"""A shorter way through a training batch, for clients whose Trainers have nothing else to do in between.

A Trainer calls some fifty hooks a batch. On small networks that costs as much as the training; on two threads, whose
caches a convolution has just filled with something else, about a millisecond. Where nobody listens to those hooks the
calls are left out, and what remains is done in the same order: forward, backward, step, counters, schedules.
"""

from functools import cache
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lit_pfl.lightning_internals.lean_loop import LeanEpochLoop

#: what a module may do during a batch, and then takes the Trainer's own way
HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "lr_scheduler_step",
)  # fmt: skip


def make_lean(trainer: L.Trainer, module: L.LightningModule, own: L.Callback) -> None:
    """Let a Trainer take the short way, if neither it nor the module has anything that would be left out.

    Args:
        trainer: the Trainer, before its fit. It has no validation data.
        module: what it will train.
        own: the one callback that may be there, since it does nothing during a batch.
    """
    plain = (
        type(trainer.precision_plugin) is Precision
        and type(trainer.strategy) is SingleDeviceStrategy
        and trainer.callbacks == [own]  # type: ignore[attr-defined]
        and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        and not trainer.loggers
        and trainer.gradient_clip_val is None
        and trainer.accumulate_grad_batches == 1
        and trainer.barebones is False
        and not any(is_overridden(hook, module) for hook in HOOKS)
    )
    lean = _lean_loop() if plain else None
    if lean is not None:
        loop = trainer.fit_loop.epoch_loop
        trainer.fit_loop.epoch_loop = lean(trainer, min_steps=loop.min_steps, max_steps=loop.max_steps)


@cache  # so that there is one warning
def _lean_loop() -> "type[LeanEpochLoop] | None":
    """Return the short way, or None where this Lightning's own loop is not the one that it was made for."""
    try:
        from lit_pfl.lightning_internals.lean_loop import LeanEpochLoop
    except (ImportError, AttributeError) as error:
        rank_zero_warn(
            f"lightning {L.__version__} trains batches in another way than the releases that lit-pfl knows ({error}). "
            "Clients take the Trainer's own loop: the same results, 0.3 ms a batch slower."
        )
        return None
    return LeanEpochLoop
