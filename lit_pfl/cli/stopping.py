"""SIGTERM and Ctrl-C: a fit ends with its last complete round."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

from lit_pfl.lightning_internals import signals_kept


class Stopped(SystemExit):
    """The process was asked to stop. Not an error, so that nobody on the way handles it as one."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.name = signal.Signals(signum).name


class Stops(L.Callback):
    """Ends a fit on SIGTERM and SIGINT: at once in the middle of a round, which is dropped; never at its end.

    A round's end is written in several places, its checkpoint last; a signal waits until all is written.

    Attributes:
        asked: the stop that was asked for. Whatever waited may have ended with another exit for it, as Ray does.
    """

    def __init__(self) -> None:
        self._writing = False
        self.asked: Stopped | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the signals. Elsewhere than in the main thread nobody can."""
        with signals_kept() as settable:
            for signum in (signal.SIGTERM, signal.SIGINT) if settable else ():
                signal.signal(signum, self._on_signal)
            yield

    def _on_signal(self, signum: int, frame: Any) -> None:
        self.asked = Stopped(signum)
        if not self._writing:
            raise self.asked

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to write a round. The first of the callbacks."""
        self._writing = True

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round is written."""
        self.written()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last round is written. From now on signals wait for :meth:`written`: a Trainer's end cannot be redone."""
        self.written()
        self._writing = True

    def written(self) -> None:
        """All is written: end the fit if a signal has come meanwhile."""
        self._writing = False
        if self.asked is not None:
            raise self.asked
