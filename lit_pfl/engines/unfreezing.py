"""What has been frozen or unfrozen in training, which no ``state_dict()`` holds."""

from collections.abc import Mapping
from typing import Any

from lit_pfl.core import Client


class Unfreezing:
    """Knows which parameters of clients have another ``requires_grad`` than when they were made."""

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
