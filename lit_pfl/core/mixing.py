"""A server that sends every client a mixture of its own."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lit_pfl.core.averaging import Mixtures
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError


class MixingServer(Server):
    """A server that sends every client its own mixture of all clients' latest uploads.

    A method says how by one K x K row-stochastic matrix, see :meth:`mixing_matrix`. A client that has never uploaded
    takes no part in anybody's mixture, and gets the initial tensors.
    """

    one_model = False

    kept: ClassVar[tuple[str, ...]] = ("weights", "latest")

    latest: dict[int, Payload]
    weights: Tensor
    _mixtures: tuple[dict[int, Payload], Mixtures] | None = None  # and of what they are

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.latest, self.weights = {}, torch.empty(0)

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        """Return the weights of the mixtures.

        Args:
            round: the round's number, from 1.
            latest: the latest upload of each of the J clients seen so far, by id, in increasing order.

        Returns:
            (J, J) float tensor; row i holds the weights of everybody's tensors in client i's mixture and sums to 1.
        """
        raise NotImplementedError

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        self._mixtures = None  # which would keep the former uploads in memory
        # Copies, because an upload of this process is the client's own memory and changes when it trains on.
        copies = {client: upload.clone() for client, upload in uploads.items()}
        self.latest = dict(sorted((self.latest | copies).items()))
        matrix = self.mixing_matrix(round, self.latest)
        self.weights = torch.as_tensor([] if matrix is None else matrix)  # solvers return NumPy's arrays
        shape, size = tuple(self.weights.shape), len(self.latest)
        if shape != (size, size) or not bool(((self.weights.sum(1) - 1).abs() < 1e-3).all()):
            raise ConfigError(
                f"{type(self).__name__}.mixing_matrix returns a matrix of shape {shape} in round {round}; for {size} "
                f"clients it must be {(size, size)}, with rows that sum to 1."
            )

    def reply(self, client: int) -> Payload:
        if client not in self.latest:
            return self.model
        row = self.weights[list(self.latest).index(client)].tolist()
        mixed = [upload for upload, weight in zip(self.latest.values(), row, strict=True) if weight != 0]
        every = dict.fromkeys(name for upload in (self.latest[client], *mixed) for name in upload)
        if self._mixtures is None or self._mixtures[0] is not self.latest:  # a state was loaded
            payloads = list(self.latest.values())
            self._mixtures = self.latest, Mixtures(payloads, filter(self.is_averaged, payloads[0]))
        mixtures = self._mixtures[1]
        return Payload(mixtures.mean(row, filter(self.is_averaged, every)), mixtures.payloads[0].sparse)

    def mixing(self) -> tuple[list[int], Tensor] | None:
        return (list(self.latest), self.weights) if self.latest else None
