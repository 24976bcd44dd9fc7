"""How much work a round is, for simulated time."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lit_pfl.data import ClientData
from lit_pfl.errors import ConfigError


def batches_of_round(client: int, data: ClientData, local_epochs: int, options: Mapping[str, Any]) -> int:
    """Return how many batches a client trains in a round.

    Args:
        client: its id.
        data: its data.
        local_epochs: epochs of a round.
        options: ``federation.client_trainer``, which may limit the batches of an epoch.

    Raises:
        ConfigError: when its loader has no length.
    """
    batches = sized_len(data.train)
    limit = options.get("limit_train_batches")
    if isinstance(limit, int):
        batches = limit if batches is None else min(batches, limit)
    if batches is None:
        raise ConfigError(
            f"federation.deadline, or asynchronous: client {client}'s training loader has no length, so nobody knows "
            "how long a round takes; set federation.client_trainer.limit_train_batches to a number of batches."
        )
    if isinstance(limit, float):
        batches = max(1, int(batches * limit))
    return batches * local_epochs
