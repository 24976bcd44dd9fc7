"""What a client is to learn."""

from dataclasses import dataclass
from typing import Any

from lit_pfl.data import ClientData


@dataclass(frozen=True)
class ClientSpec:
    """What a client is to learn.

    Args:
        client_id: the client's id.
        example: a batch of its data, with the shapes and types of all others; None where it is not known.
        num_classes: number of classes it distinguishes; None where that is not its task, or not known.
        labels_agree: whether label c means the same at every client.
        local_epochs: epochs that the client trains in a round; None where it is not known yet.
    """

    client_id: int = 0
    example: Any = None
    num_classes: int | None = None
    labels_agree: bool = True
    local_epochs: int | None = None

    @classmethod
    def of(cls, client_id: int, data: ClientData, local_epochs: int) -> "ClientSpec":
        """Return what a client with some data is to learn."""
        return cls(client_id, data.example, data.num_classes, data.labels_agree, local_epochs)
