"""A Trainer's loops over epochs and batches, without the hooks that nobody uses.

It depends on how Lightning's own is written, and says so when imported next to one that is written otherwise.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from torch.optim import Optimizer

from lit_pfl.lightning_internals.endless import Elsewhere, EndlessFitLoop
from lit_pfl.lightning_internals.optimizer_step import drop_gradients, take_step

#: optimizers that need no closure; others may call the one they are given more than once
STEP_ONCE = {
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {torch.optim.LBFGS}
#: what is replaced or called here, and the parameters that it is known to have
KNOWN: dict[Callable[..., Any], tuple[str, ...]] = {
    _FitLoop.__init__: ("self", "trainer", "min_epochs", "max_epochs"),
    _FitLoop.on_advance_end: ("self",),
    _TrainingEpochLoop.__init__: ("self", "trainer", "min_steps", "max_steps"),
    _TrainingEpochLoop.run: ("self", "data_fetcher"),
    _TrainingEpochLoop.on_iteration_done: ("self",),
    _TrainingEpochLoop.update_lr_schedulers: ("self", "interval", "update_plateau_schedulers"),
    _LoggerConnector.on_batch_start: ("self", "batch", "dataloader_idx"),
    _LoggerConnector.on_batch_end: ("self",),
    _LoggerConnector.epoch_end_reached: ("self",),
    _LoggerConnector.on_epoch_end: ("self",),
    _LoggerConnector.reset_results: ("self",),
}
for function, parameters in KNOWN.items():
    if tuple(inspect.signature(function).parameters) != parameters:
        raise ImportError(f"{function.__qualname__} has other parameters than {', '.join(parameters)}")


class LeanFitLoop(EndlessFitLoop):
    """The Trainer's loop over epochs, with less at the end of each."""

    epoch_loop: "LeanEpochLoop"

    def on_advance_end(self) -> None:
        """Tell of the end of an epoch."""
        trainer, module = self.trainer, self.trainer.strategy.lightning_module
        assert module is not None
        connector, results = trainer._logger_connector, self.epoch_loop._results
        if results or trainer.lr_scheduler_configs or self.epoch_loop.somebody_listens:
            super().on_advance_end()
            return
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        module._current_fx_name = "on_train_epoch_end"
        module.on_train_epoch_end()
        if results:  # logged just now
            connector.on_epoch_end()
        self.exchange()


class LeanEpochLoop(_TrainingEpochLoop):
    """The Trainer's loop over batches without the hooks that nobody uses."""

    elsewhere: Elsewhere | None = None

    @property
    def somebody_listens(self) -> bool:
        """Whether the module has brought callbacks of its own into the Trainer."""
        return len(self.trainer.callbacks) > 1  # type: ignore[attr-defined]

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Train an epoch."""
        strategy, count = self.trainer.strategy, self.trainer.num_training_batches
        module, optimizers = strategy.lightning_module, strategy.optimizers
        assert module is not None
        plain = (
            len(optimizers) == 1
            and type(optimizers[0]) in STEP_ONCE
            and module.automatic_optimization
            and not self.restarting
            and not self.somebody_listens
        )
        if not plain or not isinstance(count, int):
            super().run(data_fetcher)
            return
        self.reset()
        # Not from the fetcher, which takes a batch apart and puts it together again.
        batches = islice(data_fetcher.combined_loader.iterables, count)
        with suppress(StopIteration):  # of a training_step that ends the epoch
            if self.elsewhere is None:
                self._train(module, optimizers[0], batches, count)
            else:
                self._have_trained(self.elsewhere, optimizers[0], batches)
        self.on_iteration_done()

    def _train(self, module: L.LightningModule, optimizer: Optimizer, batches: Iterable[Any], count: int) -> None:
        trainer, progress = self.trainer, self.batch_progress
        connector, results = trainer._logger_connector, self._results
        step = self.automatic_optimization.optim_progress.optimizer.step
        device, scheduled = trainer.strategy.root_device, bool(trainer.lr_scheduler_configs)
        for index, batch in enumerate(batches):
            if device.type != "cpu":  # where the batches of anybody's own DataLoader are
                batch = move_data_to_device(batch, device)
            progress.is_last_batch = index + 1 == count
            progress.increment_ready()
            # what connector.on_batch_start does, which has to find the results first
            connector._first_loop_iter = index == 0
            results.batch, results.batch_size, results.dataloader_idx = batch, None, None
            progress.increment_started()

            if batch is not None:  # of a collate_fn that has dropped all of its samples
                module._current_fx_name = "training_step"
                output: Any = module.training_step(batch, index)
                module._current_fx_name = None
                loss = output if output is None or isinstance(output, Tensor) else output["loss"]
                del output  # what else is in it would live as long as the next batch's
                drop_gradients(optimizer)  # those that a hook or the step itself has left
                if loss is not None:
                    loss.backward()
                step.increment_ready()
                take_step(optimizer)
                step.increment_completed()
                drop_gradients(optimizer)  # at once, so that the next batch finds this memory warm

            progress.increment_processed()
            if scheduled:
                self.update_lr_schedulers("step", update_plateau_schedulers=False)
                if progress.is_last_batch:
                    self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            if results:
                connector.on_batch_end()
            else:  # nothing was logged
                results.batch = None
            progress.increment_completed()
            if scheduled:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._batches_that_stepped += 1
            if trainer.should_stop and self.done:
                break

    def _have_trained(self, elsewhere: Elsewhere, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        """Let somebody else train an epoch, and count it."""
        own, progress = self.trainer.strategy.root_device, self.batch_progress
        step = self.automatic_optimization.optim_progress.optimizer.step
        everything = [batch if own.type == "cpu" else move_data_to_device(batch, own) for batch in batches]
        elsewhere(optimizer, everything)
        if not everything:
            return
        progress.is_last_batch = True
        for count in (
            progress.increment_ready, progress.increment_started, progress.increment_processed,
            progress.increment_completed, step.increment_ready, step.increment_completed,
        ):  # fmt: skip
            for _ in everything:
                count()
        self._batches_that_stepped += len(everything)
        if self.trainer.lr_scheduler_configs:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def replace_loops(trainer: L.Trainer, elsewhere: Elsewhere | None) -> None:
    """Give a Trainer these loops instead of its own, before its fit; see :func:`make_lean`."""
    former = trainer.fit_loop
    assert isinstance(former, EndlessFitLoop)
    trainer.fit_loop = loop = LeanFitLoop(trainer, former.min_epochs, former.max_epochs)
    loop.last, loop.validate, loop.round_ends = former.last, former.validate, former.round_ends
    loop.epoch_loop = LeanEpochLoop(trainer, former.min_steps, former.max_steps)
    loop.epoch_loop.elsewhere = elsewhere
