"""What a Trainer tells of a federation before it begins."""

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_pfl.core import Client


def described(client: Client, of: int) -> str:
    """Return what clients are like, in a line.

    Args:
        client: any of them.
        of: their number.
    """
    each, sent = (
        sum(p.numel() for p in parameters) for parameters in (client.parameters(), client.shared_parameters().values())
    )
    return (
        f"{of} clients of {type(client).__name__}; each has {each:,} parameters and shares {sent:,} numbers of its "
        f"{type(client.learner).__name__}."
    )


def summarize(trainer: L.Trainer, line: str) -> None:
    """Say a line instead of a Trainer's summary of layers, if it has one.

    It would show an empty table: a federation has no layers of its own.
    """
    others = [callback for callback in trainer.callbacks if not isinstance(callback, ModelSummary)]  # type: ignore[attr-defined]
    if len(others) == len(trainer.callbacks):  # type: ignore[attr-defined]
        return
    trainer.callbacks = others  # type: ignore[attr-defined]
    rank_zero_info(line)
