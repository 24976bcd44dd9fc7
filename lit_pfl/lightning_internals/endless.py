"""A client's loop over epochs: no end of its own, and every epoch is over before the client exchanges."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

Elsewhere = Callable[[Optimizer, list[Any]], None]


class EndlessFitLoop(_FitLoop):
    """The Trainer's loop over epochs of a client.

    ``max_epochs`` is a plan and no end: a learner may ask its Trainer for the number of epochs or of steps, as for a
    schedule that ends with them, but a federation may continue for longer. It is the federation that ends a client's
    training.

    A client waits for the server inside the callback ``last``, and is saved there. So that callback comes after all
    else that an epoch's end brings: validation, other callbacks, the module's hook, schedules that monitor a score.

    Attributes:
        last: the callback in which the client waits.
        validate: called at the end of every epoch before all callbacks.
        round_ends: says whether the present epoch is the last of a round. A stop is put off until then.
        batches_left: how many batches are yet to be trained at most; None: all of every epoch.
    """

    last: L.Callback
    validate: Callable[[], None]
    round_ends: Callable[[], bool]
    batches_left: int | None = None
    _asked_to_stop = False

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        planned, self.max_epochs = self.max_epochs, -1
        try:
            return super().done
        finally:
            self.max_epochs = planned

    def setup_data(self) -> None:
        """Set the loader up, without a warning of rarely written metrics: a client's Trainer writes none."""
        trainer: Any = self.trainer
        every, trainer.log_every_n_steps = trainer.log_every_n_steps, 0
        loader: Any = self._data_source.instance
        loader.waits = self._data_fetcher is None  # this fit has not begun
        try:
            super().setup_data()
        finally:
            trainer.log_every_n_steps, loader.waits = every, False

    def _load_combined_loader_states(self) -> None:
        """Give the loader its state back; Lightning does so only where an epoch was not over."""
        loader: Any = self._data_source.instance
        for state in self._combined_loader_states_to_load:
            if hasattr(loader, "load_state_dict"):  # else it is another loader by now
                loader.load_state_dict(state)
        self._combined_loader_states_to_load = []

    def on_run_start(self) -> None:
        """Start training; in it the client joins, and waits for its first reply."""
        super().on_run_start()
        # Of loaders without a length Lightning fetches a batch ahead, the first before the client has joined. It has
        # found none, and is to fetch one now: as in every later epoch.
        fetcher = self._data_fetcher
        if fetcher is not None and fetcher.length is None:
            iter(fetcher)

    def advance(self) -> None:
        """Train an epoch, or what of it may be trained."""
        if self.batches_left is None:
            super().advance()
            return
        every, self.max_batches = self.max_batches, min(self.max_batches, self.batches_left)
        try:
            super().advance()
        finally:
            self.batches_left -= int(self.max_batches)
            cut, self.max_batches = 0 < self.max_batches < every, every
        # schedules of epochs count this one, of which something was trained
        self.epoch_loop.batch_progress.is_last_batch |= cut

    def on_advance_end(self) -> None:
        """End an epoch: as Lightning does, except for the one callback that comes last."""
        trainer = self.trainer
        connector = trainer._logger_connector
        connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        with _without(trainer, self.last):
            self.validate()
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
            call._call_lightning_module_hook(trainer, "on_train_epoch_end")
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
            connector.on_epoch_end()
            if not self.restarting and self.epoch_loop._num_ready_batches_reached():
                self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.exchange()

    def exchange(self) -> None:
        """Wait for the server at the end of an epoch, and end the epoch."""
        trainer = self.trainer
        # a client whose callbacks have ended its training finishes the round: half a round is nothing to upload
        self._asked_to_stop |= trainer.should_stop
        trainer.should_stop = self._asked_to_stop and self.round_ends()
        module = trainer.lightning_module
        module._current_fx_name = "on_train_epoch_end"
        self.last.on_train_epoch_end(trainer, module)
        module._current_fx_name = None
        trainer._logger_connector.reset_results()
        self.epoch_progress.increment_completed()
        if trainer.received_sigterm:
            raise SIGTERMException


def limit_batches(trainer: L.Trainer, batches: int | None) -> None:
    """Let a client train at most this many batches from now on; None: all of every epoch."""
    loop = trainer.fit_loop
    assert isinstance(loop, EndlessFitLoop)
    loop.batches_left = batches


@contextmanager
def _without(trainer: L.Trainer, callback: L.Callback) -> Iterator[None]:
    every: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    trainer.callbacks = [one for one in every if one is not callback]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.callbacks = every  # type: ignore[attr-defined]


def make_endless(
    trainer: L.Trainer, last: L.Callback, validate: Callable[[], None], round_ends: Callable[[], bool]
) -> None:
    """Give a client's Trainer this loop, before its fit; see :class:`EndlessFitLoop`."""
    former = trainer.fit_loop
    trainer.fit_loop = loop = EndlessFitLoop(trainer, former.min_epochs, former.max_epochs)
    loop.epoch_loop = former.epoch_loop
    loop.last, loop.validate, loop.round_ends = last, validate, round_ends
