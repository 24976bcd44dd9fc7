"""What a Trainer tells of a federation before it begins."""

from collections.abc import Mapping

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_pfl.core import Client


def summarize(trainer: L.Trainer, clients: Mapping[int, Client], of: int) -> None:
    """Say in place of a Trainer's summary of layers, if it has one, what its clients are like.

    It would show an empty table: a federation has no layers of its own.

    Args:
        trainer: the Trainer.
        clients: the clients of this process, which are alike.
        of: number of clients in all.
    """
    others = [callback for callback in trainer.callbacks if not isinstance(callback, ModelSummary)]  # type: ignore[attr-defined]
    if len(others) == len(trainer.callbacks):  # type: ignore[attr-defined]
        return
    trainer.callbacks = others  # type: ignore[attr-defined]
    client = next(iter(clients.values()))
    each, sent = (sum(p.numel() for p in parameters) for parameters in (client.parameters(), client.shared_tensors()))
    rank_zero_info(
        f"{of} clients of {type(client).__name__}; each has {each:,} parameters and shares {sent:,} numbers of its "
        f"{type(client.learner).__name__}."
    )
