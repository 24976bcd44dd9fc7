"""A Trainer's loop over batches, without the hooks that nobody uses.

It depends on how Lightning's own is written, and says so when imported beside one that is written otherwise.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

#: optimizers that need no closure; others may call the one they are given more than once
STEP_ONCE = {
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {torch.optim.LBFGS}
#: what is replaced or called here, and the parameters that it is known to have
KNOWN: dict[Callable[..., Any], tuple[str, ...]] = {
    _TrainingEpochLoop.__init__: ("self", "trainer", "min_steps", "max_steps"),
    _TrainingEpochLoop.advance: ("self", "data_fetcher"),
    _TrainingEpochLoop.on_advance_end: ("self", "data_fetcher"),
    _TrainingEpochLoop.update_lr_schedulers: ("self", "interval", "update_plateau_schedulers"),
    _TrainingEpochLoop._num_ready_batches_reached: ("self",),
    _LoggerConnector.on_batch_start: ("self", "batch", "dataloader_idx"),
    _LoggerConnector.on_batch_end: ("self",),
}
for function, parameters in KNOWN.items():
    if tuple(inspect.signature(function).parameters) != parameters:
        raise ImportError(f"{function.__qualname__} has other parameters than {', '.join(parameters)}")


class LeanEpochLoop(_TrainingEpochLoop):
    """The Trainer's loop over batches without the hooks that nobody uses."""

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on a batch."""
        trainer = self.trainer
        strategy = trainer.strategy
        module, optimizers = strategy.lightning_module, strategy.optimizers
        assert module is not None
        if len(optimizers) != 1 or type(optimizers[0]) not in STEP_ONCE or not module.automatic_optimization:
            super().advance(data_fetcher)
            return
        batch, _, _ = next(data_fetcher)
        device = strategy.root_device
        if device.type != "cpu":  # where the batches of anybody's own DataLoader are
            batch = move_data_to_device(batch, device)
        optimizer = optimizers[0]
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
        if self._results:
            trainer._logger_connector.on_batch_end()
        else:  # nothing was logged
            self._results.batch = None
        self.batch_progress.increment_completed()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Count the batch."""
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        self._batches_that_stepped += 1
