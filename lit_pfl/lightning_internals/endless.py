"""A Trainer that knows how long it is planned to train, and goes on until it is told to stop."""

import lightning as L
from lightning.pytorch.loops.fit_loop import _FitLoop


class EndlessFitLoop(_FitLoop):
    """The Trainer's loop over epochs, for which ``max_epochs`` is a plan and no end.

    A learner may ask its Trainer for the number of epochs or of steps, as for a schedule that ends with them. But a
    federation may go on for longer: it is the federation that ends a client's training.
    """

    endless = True

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        if not self.endless:
            return super().done
        planned, self.max_epochs = self.max_epochs, -1
        try:
            return super().done
        finally:
            self.max_epochs = planned


def make_endless(trainer: L.Trainer) -> None:
    """Let a Trainer's ``max_epochs`` end nothing, before its fit."""
    former = trainer.fit_loop
    trainer.fit_loop = EndlessFitLoop(trainer, former.min_epochs, former.max_epochs)
    trainer.fit_loop.epoch_loop = former.epoch_loop
