"""One federation trains at a time in a process."""

import threading

import lightning as L

from lit_pfl.errors import ConfigError

#: held by the thread whose federation trains: all random numbers are drawn from the process's generators
_TRAINING = threading.RLock()


class OneAtATime(L.Callback):
    """Refuses a fit while a federation trains in another thread of the process."""

    def __init__(self) -> None:
        self._held = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to train.

        Raises:
            ConfigError: when another thread's federation trains.
        """
        if stage != "fit":
            return
        self._held = _TRAINING.acquire(blocking=False)
        if not self._held:
            raise ConfigError(
                "Another federation trains in another thread of this process, and both would draw from the same random "
                "numbers; run them one after another, or in processes of their own."
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let others begin."""
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let others begin."""
        self._end()

    def _end(self) -> None:
        if self._held:
            _TRAINING.release()
        self._held = False
