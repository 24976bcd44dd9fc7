"""A shorter way through a training batch, for clients whose Trainers have nothing else to do in between.

A Trainer calls some fifty hooks a batch. On small networks that costs as much as the training; on two threads, whose
caches a convolution has just filled with something else, about a millisecond. Where nobody listens to those hooks the
calls are left out, and what remains is done in the same order: forward, backward, step, counters, schedules.
"""

from collections.abc import Callable
from functools import cache

import lightning as L
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.lightning_internals.endless import Elsewhere

#: what a module may do during a batch, and then takes the Trainer's own way
HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "lr_scheduler_step",
)  # fmt: skip


def make_lean(
    trainer: L.Trainer,
    module: L.LightningModule,
    own: L.Callback,
    elsewhere: Elsewhere | None = None,
    data: L.LightningDataModule | None = None,
) -> None:
    """Let a Trainer take the short way, if neither it nor the module has anything that would be left out.

    Args:
        trainer: the Trainer, before its fit. It has no validation data.
        module: what it will train.
        own: the one callback that may be there, since it does nothing during a batch.
        elsewhere: trains on an epoch's batches instead of the Trainer, given its optimizer and them.
        data: a data module whose batch hooks are to be called, if there is one.
    """
    plain = (
        type(trainer.precision_plugin) is Precision
        and type(trainer.strategy) is SingleDeviceStrategy
        and trainer.callbacks == [own]  # type: ignore[attr-defined]
        and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        and trainer.gradient_clip_val is None
        and trainer.accumulate_grad_batches == 1
        and trainer.barebones is False
        and not any(is_overridden(hook, module) for hook in HOOKS)
        and not (data and any(is_overridden(hook, data, L.LightningDataModule) for hook in HOOKS[:3]))
    )
    if plain and (shorten := _short_way()) is not None:
        shorten(trainer, elsewhere)


@cache  # so that there is one warning
def _short_way() -> Callable[[L.Trainer, Elsewhere | None], None] | None:
    """Return what gives it to a Trainer, or None where Lightning's own loops are not those that it was made for."""
    try:
        from lit_pfl.lightning_internals.lean_loop import replace_loops
    except (ImportError, AttributeError) as error:
        rank_zero_warn(
            f"lightning {L.__version__} trains batches in another way than the releases that lit-pfl knows ({error}). "
            "Clients take the Trainer's own loop: the same results, 0.3 ms a batch slower."
        )
        return None
    return replace_loops
