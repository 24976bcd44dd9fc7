"""What becomes of clients when a federation ends by an error, and of other threads while it trains."""

import threading

import lightning as L

from lit_pfl.engines import Engine
from lit_pfl.errors import ConfigError

#: held by the thread whose federation trains: all random numbers are drawn from the process's generators
_TRAINING = threading.RLock()


class EndsFits(L.Callback):
    """Ends the clients' fits when an error ends the federation's, in training, in validation or in a callback.

    While a federation trains, none begins in another thread.

    Args:
        engine: where the clients live.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._held = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to train, unless another thread does.

        Raises:
            ConfigError: when one does.
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
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End them, and the engine's processes; after a failed test all may go on."""
        if trainer.state.fn == "fit":
            self.engine.abort()
        self._release()

    def _release(self) -> None:
        if self._held:
            _TRAINING.release()
        self._held = False
