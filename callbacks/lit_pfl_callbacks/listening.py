"""Learning what a federation sends."""

from abc import ABC, abstractmethod

import lightning as L

from lit_pfl_callbacks.protocols import HasTraffic, Transfer, Watcher
from lit_pfl_callbacks.rounds import loop_of


class Listening(L.Callback, ABC):
    """A callback that receives every upload and reply for as long as a fit lasts."""

    @abstractmethod
    def _note(self, sent: Transfer) -> None:
        """Take note of what is sent."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen."""
        watchers = watchers_of(trainer, pl_module)
        if self._note not in watchers:
            watchers.append(self._note)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen no more."""
        self._leave(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Listen no more; of a round that is broken off nothing is kept."""
        self._leave(trainer, pl_module)

    def _leave(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        watchers = watchers_of(trainer, pl_module)
        if self._note in watchers:
            watchers.remove(self._note)


def is_told(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    """Say whether anything is sent that a callback of this Trainer is notified of."""
    return isinstance(pl_module, HasTraffic) or loop_of(trainer) is not None


def watchers_of(trainer: L.Trainer, pl_module: L.LightningModule) -> list[Watcher]:
    """Return the list to join to get what is sent; one that nobody reads where nothing is."""
    if isinstance(pl_module, HasTraffic):
        return pl_module.traffic.watchers
    loop = loop_of(trainer)
    return [] if loop is None else loop.watchers
