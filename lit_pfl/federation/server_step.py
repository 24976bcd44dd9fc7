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


def scale_nothing(trainer: L.Trainer) -> None:
    """Let a Trainer in ``16-mixed`` scale no losses: a server's step has none, and clients scale their own."""
    if isinstance(trainer.precision_plugin, MixedPrecision):
        trainer.precision_plugin.scaler = None
