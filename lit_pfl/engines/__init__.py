"""Where clients run. Whoever runs a server knows this interface only."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

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
