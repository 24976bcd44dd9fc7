"""The server's step, as a Trainer counts steps."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision


class ServerStep(torch.optim.Optimizer):
    """Runs the closure it is given."""

    def __init__(self) -> None:
        # what Lightning's LearningRateMonitor looks for
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {"lr": 1.0, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: D102
        closure()


def leave_to_clients(trainer: L.Trainer) -> None:
    """Take from a Trainer what clients do themselves.

    Scaling losses in ``16-mixed``: a server's step has none. And inference mode: what is scored may need gradients, as
    a method that adapts to test data does.
    """
    if isinstance(trainer.precision_plugin, MixedPrecision):
        trainer.precision_plugin.scaler = None
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
