"""States of clients that are not in a worker's memory: they come with its work, and go back with what came of it."""

from collections.abc import Mapping

from lit_pfl.lightning_internals import Content


class Carried:
    """What a worker has of states instead of files, which another process has.

    Attributes:
        sent: by client id the state of a client that is to work next; None for one that is as it was made.
        changed: by client id the state that came of it.
    """

    def __init__(self) -> None:
        self.sent: Mapping[int, Content | None] = {}
        self.changed: dict[int, Content] = {}

    def read(self, client: int) -> Content | None:
        """Return a client's state.

        Raises:
            KeyError: when it has not been sent: a client must not begin again that has trained before.
        """
        return self.sent[client]

    def put(self, client: int, state: Content, trained: bool) -> None:
        """Take note of the state of a client that has trained."""
        self.changed[client] = state
