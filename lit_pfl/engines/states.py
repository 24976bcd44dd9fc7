"""What belongs to clients' states besides tensors, and which states a client can continue from."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.errors import ConfigError


class Replaced:
    """Knows which tensors of clients replies replace, and which of them clients are without.

    They need not be kept until a client's next round. Only where nobody asks for models as they have trained, see
    ``keep_trained`` of :class:`~lit_pfl.Federation`.
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

        ``trains``: the client goes on from there; otherwise it is put back.
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


class Unfreezing:
    """Knows which parameters of clients have another ``requires_grad`` than when they were made.

    No ``state_dict()`` holds what has been frozen or unfrozen in training.
    """

    def __init__(self) -> None:
        self._at_first: dict[int, frozenset[str]] = {}

    def made(self, client: int, module: Client) -> None:
        """Take note of a client that has just been made."""
        self._at_first[client] = _training(module)

    def forget(self, client: int) -> None:
        """Know nothing of a client."""
        self._at_first.pop(client, None)

    def changes(self, client: int, module: Client) -> dict[str, Any]:
        """Return what its state has to hold next to its tensors; nothing if nothing has changed."""
        now = _training(module)
        flags = {name: name in now for name in sorted(now ^ self._at_first[client])}
        return {
            **({"requires_grad": flags} if flags else {}),
            **({"thawed": [*module.thawed]} if module.thawed else {}),
        }

    def restore(self, client: int, module: Client, state: Mapping[str, Any]) -> None:
        """Freeze and unfreeze a client's parameters as they were when its state was returned.

        Its fit has started, with optimizers as at first; callbacks may have frozen something as they did then.
        """
        flags = state.get("requires_grad", {})
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(flags.get(name, name in self._at_first[client]))


def _training(module: Client) -> frozenset[str]:
    return frozenset(name for name, x in module.named_parameters(remove_duplicate=False) if x.requires_grad)


def refuse_another_network(
    client: int, saved: Mapping[str, Any], own: Mapping[str, Any], resizes: bool = False
) -> None:
    """Compare the state of a client in a checkpoint and in a run.

    Of one that ``resizes`` its tensors in training, only numbers of dimensions must agree.
    """

    def shape(value: object) -> object:
        if not isinstance(value, Tensor):
            return "no tensor"
        return f"of {value.dim()} dimensions" if resizes else tuple(value.shape)

    for name in {**own, **saved}:
        before, now = (shape(tensors[name]) if name in tensors else "not there" for tensors in (saved, own))
        if before != now:
            raise ConfigError(
                f"model: the checkpoint is of another network: client {client}'s tensor {name!r} is {before}, where "
                f"this model's is {now}."
            )
