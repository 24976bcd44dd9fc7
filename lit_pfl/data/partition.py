"""How training samples are dealt out to clients."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from jsonargparse.typing import NonNegativeInt, PositiveFloat

Indices = npt.NDArray[np.int64]


class Partition(ABC):
    """Deals samples to clients. A new one needs :meth:`split` only, and then works by name on the command line."""

    @abstractmethod
    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Deal the samples.

        Args:
            labels: (n,) class of every sample.
            num_clients: number of clients K, at most n.
            rng: source of all randomness.

        Returns:
            K arrays of sample positions, no position twice.
        """


class IID(Partition):
    """Every client gets the same number of samples of every class.

    As in the papers a class of m samples gives every client round(m / K), and what remains is not used. Where that
    would leave a whole class out, or some client with less than 80% of another's samples, since the last ones find too
    little, the samples are dealt one by one, class by class, and all are used.

    Source:
        Factorized-FL, Section 5.1; SimFed, Section 5.1.
    """

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:  # noqa: D102
        by_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        sizes = [round(len(members) / num_clients) for members in by_class]
        shares = [
            np.concatenate([m[client * n : (client + 1) * n] for m, n in zip(by_class, sizes, strict=True)])
            for client in range(num_clients)
        ]
        if min(sizes) < 1 or min(map(len, shares)) < 0.8 * max(map(len, shares)):
            shares = [np.concatenate(by_class)[client::num_clients] for client in range(num_clients)]
        return [np.sort(share) for share in shares]


class Dirichlet(Partition):
    """Every class is divided among the clients by proportions from a symmetric Dirichlet distribution.

    Always ends after one draw: clients left with fewer than ``min_samples`` are given samples of the largest clients.

    Args:
        alpha: concentration; the smaller, the more a class gathers at few clients.
        min_samples: smallest number of samples of a client (lower if there are not enough for all); 0 allows empty
            clients, which then take no part.

    Source:
        Factorized-FL, Section 5.1 (alpha = 0.5, proportions over clients for each class).
    """

    def __init__(self, alpha: PositiveFloat = 0.5, min_samples: NonNegativeInt = 10) -> None:
        self.alpha = alpha
        self.min_samples = min_samples

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:  # noqa: D102
        shares: list[list[Indices]] = [[] for _ in range(num_clients)]
        for c in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == c))
            proportions = rng.dirichlet(np.full(num_clients, self.alpha))
            cuts = (np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
            for share, part in zip(shares, np.split(members, cuts), strict=True):
                share.append(part)
        clients = [rng.permutation(np.concatenate(share)) for share in shares]
        self._fill_up(clients, min(self.min_samples, len(labels) // num_clients))
        return [np.sort(client) for client in clients]

    @staticmethod
    def _fill_up(clients: list[Indices], least: int) -> None:
        for poor in range(len(clients)):
            while len(clients[poor]) < least:
                rich = max(range(len(clients)), key=lambda client: len(clients[client]))
                take = min(least - len(clients[poor]), len(clients[rich]) - least)
                clients[poor] = np.concatenate([clients[poor], clients[rich][-take:]])
                clients[rich] = clients[rich][:-take]


def matched_split(labels: Indices, shares: npt.NDArray[np.float64]) -> list[Indices]:
    """Deal evaluation samples so that every client is evaluated on what it is trained on.

    Args:
        labels: (n,) class of every evaluation sample.
        shares: (K, C) number of training samples of each class at each client.

    Returns:
        K arrays of positions; of class c client k gets its share of that class, rounded so that all are used. A client
        that would get nothing gets one sample of the class it has most of, shared with another client.
    """
    parts: list[list[Indices]] = [[] for _ in shares]
    for c in range(shares.shape[1]):
        members = np.flatnonzero(labels == c)
        if not len(members) or not shares[:, c].sum():
            continue
        cuts = np.rint(np.cumsum(shares[:, c])[:-1] / shares[:, c].sum() * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    clients = [np.concatenate(part) if part else np.empty(0, np.int64) for part in parts]
    present = np.isin(np.arange(shares.shape[1]), labels)
    for client, positions in enumerate(clients):
        if not len(positions) and shares[client].any() and present.any():
            members = np.flatnonzero(labels == np.where(present, shares[client], -1).argmax())
            clients[client] = members[[client % len(members)]]
    return clients
