"""What becomes of clients when a federation ends by an error."""

import lightning as L

from lit_pfl.engines import Engine


class EndsFits(L.Callback):
    """Ends the clients' fits when an error ends the federation's, in training, in validation or in a callback.

    Args:
        engine: where the clients live.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End them, and the engine's processes; after a failed test all may go on."""
        if trainer.state.fn == "fit":
            self.engine.abort()
