"""Counting what clients and server send each other, whatever the link."""

from typing import Any

from lit_pfl.core.payload import Payload
from lit_pfl_callbacks.protocols import Direction, Transfer, Watcher


class Ledger:
    """Counts every byte that would have been sent.

    Attributes:
        up: bytes from clients to server in this round.
        down: bytes from server to clients in this round.
        total: bytes both ways since the start.
        elements: tensor elements both ways since the start, as papers count them: of sparse tensors only the non-zero
            ones, and nothing for bit masks, names and shapes.
        clients: cumulative bytes by client id, ``[up, down]``.
        watchers: who is notified of everything that is sent, see :class:`~lit_pfl_callbacks.protocols.Traffic`.
    """

    def __init__(self) -> None:
        self.up = self.down = self.total = self.elements = 0
        self.clients: dict[int, list[int]] = {}
        self.watchers: list[Watcher] = []
        self._round = 1

    def new_round(self, round: int = 1) -> None:
        """Begin to count another round, whose number watchers get."""
        self.up = self.down = 0
        self._round = round

    def of_round(self) -> dict[str, int]:
        """Return the bytes of this round, and the sum of all, by the names under which they are logged."""
        return {"comm/up_bytes": self.up, "comm/down_bytes": self.down, "comm/total_bytes": self.total}

    def sent_up(self, client: int, upload: Payload) -> None:
        """Note an upload."""
        self.up += upload.nbytes
        self._count(client, upload, "up")

    def sent_down(self, client: int, reply: Payload) -> None:
        """Note a reply."""
        self.down += reply.nbytes
        self._count(client, reply, "down")

    def _count(self, client: int, payload: Payload, direction: Direction) -> None:
        self.total += payload.nbytes
        self.elements += payload.elements
        self.clients.setdefault(client, [0, 0])[direction == "down"] += payload.nbytes
        for watcher in self.watchers:
            watcher(Transfer(self._round, client, direction, payload, payload.sizes, payload.nbytes))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        counts = {name: getattr(self, name) for name in ("up", "down", "total", "elements")}
        return {**counts, "clients": {client: list(sizes) for client, sizes in sorted(self.clients.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counts."""
        self.__dict__.update(state)
        self.clients = {client: list(sizes) for client, sizes in state["clients"].items()}
