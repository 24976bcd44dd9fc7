"""A shorter way through a training batch, for clients whose Trainers have nothing else to do in between.

A Trainer calls some fifty hooks a batch. On small networks that costs as much as the training; on two threads, whose
caches a convolution has just filled with something else, about a millisecond. Where nobody listens to those hooks the
calls are left out, and what remains is done in the same order: forward, backward, step, counters, schedules.
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

#: optimizers that need no closure; others may call the one they are given more than once
STEP_ONCE = {
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {torch.optim.LBFGS}
#: what a module may do during a batch, and then takes the Trainer's own way
HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "lr_scheduler_step",
)  # fmt: skip


class LeanEpochLoop(_TrainingEpochLoop):
    """The Trainer's loop over batches without the hooks that nobody uses."""

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on a batch."""
        trainer = self.trainer
        kinds = [type(optimizer) for optimizer in trainer.optimizers]
        if len(kinds) != 1 or kinds[0] not in STEP_ONCE or not trainer.lightning_module.automatic_optimization:
            super().advance(data_fetcher)
            return
        batch, _, _ = next(data_fetcher)
        device = trainer.strategy.root_device
        if device.type != "cpu":  # where the batches of anybody's own DataLoader are
            batch = move_data_to_device(batch, device)
        [optimizer], module = trainer.optimizers, trainer.lightning_module
        step = self.automatic_optimization.optim_progress.optimizer.step
        self.batch_progress.is_last_batch = data_fetcher.done
        self.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self.batch_progress.increment_started()

        module._current_fx_name = "training_step"
        output: Any = module.training_step(batch, self.batch_idx)
        module._current_fx_name = None
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            loss.backward()
        step.increment_ready()
        optimizer.step()
        step.increment_completed()
        optimizer.zero_grad()  # at once, so that the next batch finds this memory warm

        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Count the batch."""
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        self._batches_that_stepped += 1


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
    if plain:
        loop = trainer.fit_loop.epoch_loop
        trainer.fit_loop.epoch_loop = LeanEpochLoop(trainer, min_steps=loop.min_steps, max_steps=loop.max_steps)
