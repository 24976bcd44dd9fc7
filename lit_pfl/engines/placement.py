"""Which worker has which client: by the time that clients take."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")
#: how much more than its share of a round's work a worker may have before a client of it moves to another
SLACK = 1.2


class Placement(Generic[W]):
    """Clients' homes, and how long clients take. What a worker is does not matter.

    Args:
        samples: by client id its number of training samples.

    Attributes:
        homes: by client id its worker; None for a client whose worker is lost, or has not been chosen yet.
        seconds: by client id how long its latest round took.
    """

    def __init__(self, samples: Mapping[int, int]) -> None:
        self.samples = samples
        self.homes: dict[int, W | None] = dict.fromkeys(samples)
        self.seconds: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        """Whether all clients have a home."""
        return None not in self.homes.values()

    def of(self, worker: W) -> list[int]:
        """Return the ids of a worker's clients."""
        return [client for client, home in self.homes.items() if home is worker]

    def expected(self, clients: Iterable[int]) -> dict[int, float]:
        """Return how long clients are likely to take, in seconds, or before any have trained in samples."""
        known = sum(self.samples[client] for client in self.seconds)
        each = sum(self.seconds.values()) / known if known else 1.0
        return {client: self.seconds.get(client, each * self.samples[client]) for client in clients}

    def moves(self, workers: Sequence[W], training: Iterable[int], rebalance: bool) -> dict[int, W]:
        """Return who should move where, by client id: such that all have a home, and all workers have work.

        Args:
            workers: those at work.
            training: ids of clients that are about to train.
            rebalance: whether clients may leave a worker that has too much to do.
        """
        places = {id(worker): place for place, worker in enumerate(workers)}
        homeless = [] if self.complete else [client for client, home in self.homes.items() if home is None]
        some = dict.fromkeys([*training, *homeless])
        homes = {client: None if (home := self.homes[client]) is None else places[id(home)] for client in some}
        slack = SLACK if rebalance or not self.complete else float("inf")
        dealt = assigned(self.expected(some), homes, len(workers), slack)
        return {client: workers[place] for client, place in dealt.items() if place != homes[client]}


def assigned(
    expected: Mapping[int, float], homes: Mapping[int, int | None], workers: int, slack: float = SLACK
) -> dict[int, int]:
    """Return which worker gets which client: the longest first, each to its home unless that has enough to do.

    Args:
        expected: by client how long it is likely to take.
        homes: by client where it lives now; None for nowhere.
        workers: number of workers.
        slack: how many times its share a worker may have before clients leave it.

    Example:
        >>> assigned({0: 5.0, 1: 3.0, 2: 3.0}, {}, 2)
        {0: 0, 1: 1, 2: 1}
    """
    load, share = [0.0] * workers, sum(expected.values()) / workers
    places = {}
    for client in sorted(expected, key=lambda client: (-expected[client], client)):
        home = homes.get(client)
        if home is None or load[home] + expected[client] > slack * share:
            home = min(range(workers), key=lambda place: (load[place], place != home, place))
        load[home] += expected[client]
        places[client] = home
    return places
