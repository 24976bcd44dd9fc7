"""The server's step, as a Trainer counts steps."""

from typing import Any

import torch


class ServerStep(torch.optim.Optimizer):
    """Runs the closure it is given."""

    def __init__(self) -> None:
        # what Lightning's LearningRateMonitor looks for
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {"lr": 1.0, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: D102
        closure()
