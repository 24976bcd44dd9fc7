"""One warning where a callback has nothing to do."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def waits(trainer: L.Trainer, callback: L.Callback, what: str) -> None:
    """Say what a callback waits for: once a Trainer, and in the process that writes."""
    told: Any = vars(callback)
    if told.get("_waits_at") != id(trainer):
        told["_waits_at"] = id(trainer)
        rank_zero_warn(f"{type(callback).__name__}: waits for {what}.")
