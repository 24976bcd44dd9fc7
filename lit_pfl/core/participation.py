"""Which clients train in a round, and which are there at all."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse.typing import PositiveInt

from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.randomness import Draws, check_share, number_of


@dataclass(frozen=True)
class Sampling:
    """How likely it is that a client takes part, for privacy accounting.

    Args:
        kind: ``all``: whether a client takes part depends on no other client, and privacy gains nothing by sampling;
            ``replaced``: one client may take another's place, and privacy gains nothing either; ``poisson``: every
            client is drawn on its own; ``fixed``: a fixed number without replacement.
        share: probability, or share of the clients.
    """

    kind: str = "all"
    share: float = 1.0


class Participation(ABC):
    """Chooses the clients that train in a round: ``Federation(..., participation=Bernoulli(0.1))``.

    A new one needs :meth:`draw` only, and then works by name on the command line. Draws depend on the seed and on the
    round alone, so that a resumed run draws the same clients.

    Args:
        joins: first round of every client that joins late, by client id. From 1; others are there from the start.
        leaves: last round of every client that leaves for good, by client id. A client that has left is evaluated on.

    Raises:
        ConfigError: when a round is below 1, or a client leaves before it joins.
    """

    def __init__(self, joins: dict[int, int] | None = None, leaves: dict[int, int] | None = None) -> None:
        self.joins, self.leaves = dict(joins or {}), dict(leaves or {})
        for name, rounds in (("joins", self.joins), ("leaves", self.leaves)):
            for client, round in rounds.items():
                if round < 1:
                    raise ConfigError(f"federation.participation.{name}: client {client}: rounds count from 1.")
        for client in self.joins.keys() & self.leaves.keys():
            if self.leaves[client] < self.joins[client]:
                raise ConfigError(
                    f"federation.participation: client {client} leaves after round {self.leaves[client]}, before it "
                    f"joins in round {self.joins[client]}."
                )

    def __repr__(self) -> str:
        return named(self)

    @abstractmethod
    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        """Choose among clients.

        Args:
            round: the round's number, from 1.
            clients: ids of the clients that are there in this round, in increasing order; at least one.
            samples: number of training samples of every client of the federation, by id.
            draws: source of all randomness.

        Returns:
            Ids of some of the clients.
        """

    def choose(self, completed: int, samples: Mapping[int, int], draws: Draws) -> list[int]:
        """Return the ids of the clients that train in the round after ``completed`` rounds, in increasing order.

        Raises:
            ConfigError: when nobody does.
        """
        round = completed + 1
        there = [k for k in sorted(samples) if self.joins.get(k, 1) <= round <= self.leaves.get(k, round)]
        chosen = sorted(self.draw(round, there, samples, draws)) if there else []
        if not chosen:
            raise ConfigError(
                f"federation.participation={self!r}: no client trains in round {round}; see that one does."
            )
        return chosen

    def nobody_drawn(self, completed: int, samples: Mapping[int, int], draws: Draws) -> bool:
        """Say whether nobody is drawn for a round, so that a client trains that is not."""
        return False

    def check(self, clients: Sequence[int]) -> None:
        """See that these clients can be chosen from.

        Raises:
            ConfigError: when an option is wrong, or a client of :attr:`joins` or :attr:`leaves` is not among them.
        """
        check_options_of(self, "federation.participation")
        for name, rounds in (("joins", self.joins), ("leaves", self.leaves)):
            if unknown := rounds.keys() - set(clients):
                raise ConfigError(f"federation.participation.{name}: there is no client {min(unknown)}.")

    def counts_sizes(self, clients: int) -> bool:
        """Say whether larger ones of this many clients are drawn more often, so that all count the same in the mean."""
        return False

    def sampling(self, clients: int) -> Sampling:
        """Return how some of this many clients are sampled, for privacy accounting.

        By default as if all took part in every round, and one more client displaced another.
        """
        return Sampling("replaced")


class Share(Participation):
    """A share of the clients, or a number of them, drawn without replacement. Without options, as the number alone.

    Args:
        share: share of the clients that are there (1: all of them; at least one client trains) or, above 1, their
            number.
        kwargs: see :class:`Participation`.
    """

    def __init__(self, share: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_share("federation.participation.share", share)
        self.share = share

    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        return draws.choose(clients, self.share, "participation", round - 1)

    def check(self, clients: Sequence[int]) -> None:
        super().check(clients)
        check_share("federation.participation.share", self.share, len(clients))

    def sampling(self, clients: int) -> Sampling:
        without = sampling_of(self.share, clients)
        return Sampling("replaced") if without.kind == "fixed" and (self.joins or self.leaves) else without


class Bernoulli(Participation):
    """Every client takes part with the same probability, independently of all others (Poisson sampling).

    In a round in which nobody is drawn, the client that was nearest to being drawn trains. With
    ``federation.privacy.where=central`` its update is left out.

    Args:
        probability: probability of taking part in a round, above 0 and up to 1.
        kwargs: see :class:`Participation`.

    Raises:
        ConfigError: when it is not such a probability.
    """

    def __init__(self, probability: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < probability <= 1:
            raise ConfigError(f"federation.participation.probability={probability}: give one above 0 and up to 1.")
        self.probability = probability

    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        luck = self._luck(round - 1, samples, draws)
        drawn = [client for client in clients if luck[client] < self.probability]
        return drawn or [min(clients, key=lambda client: luck[client])]

    def nobody_drawn(self, completed: int, samples: Mapping[int, int], draws: Draws) -> bool:
        luck = self._luck(completed, samples, draws)
        return all(luck[client] >= self.probability for client in self.choose(completed, samples, draws))

    @staticmethod
    def _luck(completed: int, samples: Mapping[int, int], draws: Draws) -> dict[int, float]:
        # drawn for every client of the federation, so that one's luck does not depend on who else is there
        return dict(zip(sorted(samples), draws.generator("participation", completed).random(len(samples)), strict=True))

    def sampling(self, clients: int) -> Sampling:
        return Sampling("poisson", self.probability) if self.probability < 1 else Sampling()


class BySize(Participation):
    """A number of clients, drawn without replacement with probabilities in proportion to their training samples.

    Methods that average by ``weighting`` then count all of them the same, since sizes have counted in the draw. They
    count for less than in the paper, which draws with replacement, and the less the more clients are drawn. If there
    are no more clients than ``number``, the method's own weights hold; not if some only join late or leave.

    Args:
        number: number of clients; all of those that are there, if they are fewer.
        kwargs: see :class:`Participation`.

    Source:
        Li et al. 2020 (On the Convergence of FedAvg on Non-IID Data), Scheme I, without replacement.
    """

    def __init__(self, number: PositiveInt = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number = number

    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        if self.number >= len(clients):
            return list(clients)
        sizes = np.array([samples[client] for client in clients], dtype=np.float64)
        rng = draws.generator("participation", round - 1)
        return [int(c) for c in rng.choice(clients, self.number, replace=False, p=sizes / sizes.sum())]

    def counts_sizes(self, clients: int) -> bool:
        return self.number < clients

    def sampling(self, clients: int) -> Sampling:
        return Sampling("replaced") if self.number < clients else Sampling()


class Trace(Participation):
    """The clients that a file names for each round, as recorded from a real federation, or written by hand.

    Args:
        file: CSV file with the columns ``round`` (from 1) and ``client``: one row for every client and round in which
            it takes part. Further columns are ignored.
        repeat: start again after the last round of the file. Otherwise a run that is longer is refused.
        kwargs: see :class:`Participation`.

    Raises:
        ConfigError: when the file cannot be read, or names clients that do not exist.
    """

    def __init__(self, file: str, repeat: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.file, self.repeat = str(file), repeat
        self._rounds = self._read()

    def _read(self) -> dict[int, list[int]]:
        rounds: dict[int, list[int]] = {}
        option = f"federation.participation.file={self.file}"
        for line, row in lines_of(option, self.file):
            try:
                round, client = int(row["round"]), int(row["client"])
            except (KeyError, TypeError, ValueError):
                round = client = -1
            if round < 1 or client < 0:
                raise ConfigError(f"{option}, line {line}: give a round from 1 and a client's id.")
            if client not in rounds.setdefault(round, []):
                rounds[round].append(client)
        if not rounds:
            raise ConfigError(f"{option}: it has no row; give the columns round and client.")
        return rounds

    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        last = max(self._rounds)
        if round > last and not self.repeat:
            raise ConfigError(
                f"federation.participation.file={self.file}: it ends with round {last}; set "
                "federation.participation.repeat=true, or trainer.max_epochs to at most this many."
            )
        there = set(clients)
        return [client for client in self._rounds.get((round - 1) % last + 1, []) if client in there]

    def check(self, clients: Sequence[int]) -> None:
        super().check(clients)
        if unknown := {client for chosen in self._rounds.values() for client in chosen} - set(clients):
            raise ConfigError(f"federation.participation.file={self.file}: there is no client {min(unknown)}.")

    def sampling(self, clients: int) -> Sampling:
        return Sampling()


def lines_of(option: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV file, each after the number of its line.

    Args:
        option: the option that names the file, and the name.
        file: the name.

    Raises:
        ConfigError: when it cannot be read.
    """
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            for row in rows:
                yield rows.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{option}: cannot be read: {error}") from None


def check_participation(participation: "float | Participation", clients: Sequence[int] | None = None) -> None:
    """See that clients can be chosen so, from these if they are known.

    Raises:
        ConfigError: when they cannot.
    """
    if not isinstance(participation, Participation):
        check_share("federation.participation", participation, None if clients is None else len(clients))
    elif clients is not None:
        participation.check(clients)


def named(given: object) -> str:
    """Return the name of an object's class with its options, except for empty tables."""
    options = {name: value for name, value in vars(given).items() if not name.startswith("_") and value != {}}
    return f"{type(given).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"


def participants(
    participation: "float | Participation", completed: int, samples: Mapping[int, int], draws: Draws
) -> list[int]:
    """Return the ids of the clients that train in the round after ``completed`` rounds."""
    if isinstance(participation, Participation):
        return participation.choose(completed, samples, draws)
    return draws.choose(sorted(samples), participation, "participation", completed)


def sampling_of(participation: "float | Participation", clients: int) -> Sampling:
    """Return how clients are sampled, for privacy accounting."""
    if isinstance(participation, Participation):
        return participation.sampling(clients)
    count = number_of(participation, clients)
    return Sampling("fixed", count / clients) if count < clients else Sampling()
