"""What of clients need not be kept until their next round, since the server's reply replaces it."""

from collections.abc import Collection

from lit_pfl.errors import ConfigError


class Replaced:
    """Knows which tensors of clients replies replace, and which of them clients are without.

    Only where nobody asks for models as they have trained, see ``keep_trained`` of :class:`~lit_pfl.Federation`.
    """

    def __init__(self) -> None:
        self._by_reply: dict[int, frozenset[str]] = {}  # the latest
        self._lacking: dict[int, frozenset[str]] = {}

    def names(self, client: int) -> frozenset[str]:
        """Return the names in a client's ``state_dict()`` of what the latest reply has replaced."""
        return self._by_reply.get(client, frozenset())

    def lacks(self, client: int, names: Collection[str]) -> None:
        """Take note of what a client is without."""
        self._lacking[client] = frozenset(names)

    def loads(self, client: int, names: Collection[str], trains: bool = False) -> None:
        """See that a reply has all that a client is without.

        Args:
            client: its id.
            names: what the reply replaces.
            trains: whether the client goes on from there; otherwise it is put back.

        Raises:
            ConfigError: when the reply has not.
        """
        if lost := self._lacking.get(client, frozenset()).difference(names):
            raise ConfigError(
                f"federation.keep_trained=False: client {client} needs its own {min(lost)!r} of the round before, as "
                "the server sends none; with this method, leave keep_trained out."
            )
        if trains:
            self._lacking.pop(client, None)
            self._by_reply[client] = frozenset(names)

    def forget(self, client: int) -> None:
        """Know nothing of a client."""
        self._by_reply.pop(client, None)
        self._lacking.pop(client, None)
