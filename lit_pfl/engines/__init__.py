"""Where clients run. The federation and whoever runs a server know this interface only."""

from collections.abc import Mapping
from typing import Any, Protocol

import lightning as L
from torch import Tensor, nn

from lit_pfl.errors import UploadError
from lit_pfl.payload import Payload

#: what comes of a client's round, or what was wrong with it; such a client is back where it began the round
Upload = Mapping[str, Tensor] | UploadError


class Trains(Protocol):
    """What a round needs: somebody who lets clients train."""

    def train(self, replies: Mapping[int, Payload], completed: int) -> Mapping[int, Upload]:
        """Let clients load their replies and train a round.

        Args:
            replies: by client id.
            completed: number of rounds before this one.

        Returns:
            Their uploads, by client id. A client whose fit ended by itself has none.
        """


class Engine(Trains, Protocol):
    """Runs a federation's clients, wherever they are."""

    def evaluate(self, client: int, model: str, split: Any, reply: Payload | None, trainer: L.Trainer) -> Any:
        """Score one of a client's models, with a reply loaded or as it is; leave the client as it was."""

    def standalone(self, client: int, reply: Payload | None, trainer: L.Trainer) -> nn.Module:
        """Return a copy of a client's personalized model as a network by itself; leave the client as it was."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resumed clients need."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""

    def stop(self) -> None:
        """End all clients in good order."""

    def abort(self) -> None:
        """End all clients at once, as after an error."""
