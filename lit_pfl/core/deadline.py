"""Simulated time: how long clients take, and rounds that end whoever is still training."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from lit_pfl.core.participation import lines_of, named
from lit_pfl.errors import ConfigError, LateUpload, check_options_of
from lit_pfl.randomness import Draws, check_share, number_of

#: the most that times, in seconds, and standard deviations of their logarithms may be: enough for any, and no overflow
LONGEST, WIDEST = 1e12, 10.0


class Pace(NamedTuple):
    """How fast a client is in one of its rounds, in simulated seconds.

    Args:
        batch: for a training batch.
        latency: for everything else: download, start and upload.
    """

    batch: float
    latency: float

    def seconds(self, batches: int) -> float:
        """Return how long this many batches take."""
        return self.latency + self.batch * batches

    def fitting(self, seconds: float) -> int:
        """Return how many batches fit into some time; negative where not even the latency does."""
        if not self.batch:
            return -1 if seconds < self.latency else sys.maxsize
        # rounded, so that 3 batches of 0.1 s fit into 0.3 s
        return math.floor(round((seconds - self.latency) / self.batch, 9))


class Speeds:
    """How long clients take, in simulated seconds: drawn from the seed, or read from a file.

    A client takes ``latency`` and a time for every batch that it trains. Drawn times of a batch follow a log-normal
    distribution, which has a long tail of slow clients.

    Args:
        batch: seconds for a training batch, the median over clients; 0: training takes no time.
        spread: standard deviation of the logarithm of that time over clients; 0: all are equally fast. With 1, one
            client in six takes more than 2.7 times the median.
        variation: standard deviation of the logarithm from round to round of one client.
        latency: seconds for download, start and upload together, of every client.
        file: CSV file with the columns ``client`` and ``batch``, and if wanted ``latency``: one row for every client.
            Its times are used instead of ``batch`` and ``spread``, and of ``latency`` if it has that column.

    Raises:
        ConfigError: for an option that is out of range, or when the file cannot be read.
    """

    def __init__(
        self,
        batch: NonNegativeFloat = 1.0,
        spread: NonNegativeFloat = 1.0,
        variation: NonNegativeFloat = 0.0,
        latency: NonNegativeFloat = 0.0,
        file: str | None = None,
    ) -> None:
        most = {"batch": LONGEST, "spread": WIDEST, "variation": WIDEST, "latency": LONGEST}
        for option, value in zip(most, (batch, spread, variation, latency), strict=True):
            if not 0 <= value <= most[option]:
                raise ConfigError(f"speeds.{option}={value}: give a number from 0 to {most[option]:g}.")
        self.batch, self.spread, self.variation, self.latency = batch, spread, variation, latency
        self.file = None if file is None else str(file)
        self._read = {} if self.file is None else _read(self.file, latency)

    __repr__ = named

    def check(self, clients: Sequence[int]) -> None:
        """See that every client has a speed.

        Raises:
            ConfigError: when one is not in the file.
        """
        if self.file is not None and (missing := set(clients) - self._read.keys()):
            raise ConfigError(f"speeds.file={self.file}: there is no row of client {min(missing)}.")

    def of(self, client: int, number: int, draws: Draws) -> Pace:
        """Return how fast a client is.

        Args:
            client: its id.
            number: the round, or what else distinguishes its trainings.
            draws: source of all randomness.
        """
        pace = self._read.get(client)
        if pace is None:
            luck = draws.generator("speed", client).standard_normal() if self.spread else 0.0
            pace = Pace(self.batch * math.exp(self.spread * luck), self.latency)
        if not self.variation:
            return pace
        luck = draws.generator("speed in a round", client, number).standard_normal()
        return pace._replace(batch=pace.batch * math.exp(self.variation * luck))


class Plan(NamedTuple):
    """What happens in a round, as far as time decides it.

    Args:
        seconds: how long the round takes.
        batches: how many batches clients train that do part of their work, by id.
        late: what is said of clients whose uploads come too late, by id.
    """

    seconds: float = 0.0
    batches: Mapping[int, int] = {}
    late: Mapping[int, LateUpload] = {}


class Deadline:
    """Ends a round after some simulated time: ``Federation(..., deadline=Deadline(20, wanted=10), participation=13)``.

    The server does not wait for clients that are late: their uploads are refused, as ``refused.csv`` says, and count
    against ``federation.quorum``. What they downloaded is counted. A late client discards the round: model, optimizer,
    schedule and random numbers are as if it had not taken part, so that what server and client keep of each other
    stays in agreement. The simulation does not train it at all.

    Args:
        seconds: simulated seconds after which a round ends.
        wanted: the round also ends when this many uploads have come: a share of the participants or, above 1, a number.
            Let more clients take part than are wanted (over-selection). Default: the round waits for all, up to
            ``seconds``.
        late: ``drop``: a client that cannot finish in time is late. ``partial``: it trains only the batches that
            fit, and sends the result; only a client without time for one batch is late.
        speeds: how long clients take. Default: see :class:`Speeds`.

    Raises:
        ConfigError: for an option that is out of range.

    Source:
        Bonawitz et al. 2019, Sections 2.2 and 9 (deadline, over-selection by 30 %, late reports are ignored); Li et al.
        2020 (FedProx), Algorithm 2, and Wang et al. 2020 (FedNova) for partial work.
    """

    def __init__(
        self,
        seconds: PositiveFloat,
        wanted: float | None = None,
        late: Literal["drop", "partial"] = "drop",
        speeds: Speeds | None = None,
    ) -> None:
        if not 0 < seconds <= LONGEST:
            raise ConfigError(f"federation.deadline.seconds={seconds}: give a number above 0, up to {LONGEST:g}.")
        if wanted is not None:
            check_share("federation.deadline.wanted", wanted)
        self.seconds, self.wanted, self.late = seconds, wanted, late
        check_options_of(self, "federation.deadline")
        self.speeds = speeds or Speeds()

    __repr__ = named

    def plan(self, round: int, batches: Mapping[int, int], draws: Draws) -> Plan:
        """Return what happens in a round.

        Args:
            round: its number, from 1.
            batches: how many batches each participant has in a whole round, by id.
            draws: source of all randomness.
        """
        finished: dict[int, float] = {}  # when uploads come, of those that come before the deadline
        cut: dict[int, int] = {}
        paces = {client: self.speeds.of(client, round, draws) for client in sorted(batches)}
        for client, pace in paces.items():
            fit = min(pace.fitting(self.seconds), batches[client])
            if fit < batches[client]:
                if self.late == "drop" or fit < 1:
                    continue
                cut[client] = fit
            finished[client] = pace.seconds(fit)
        wanted = len(batches) if self.wanted is None else number_of(self.wanted, len(batches))
        used = sorted(finished, key=lambda client: (finished[client], client))[:wanted]
        complete = len(used) == wanted
        ends = finished[used[-1]] if complete and used else float(self.seconds)
        late = {
            client: LateUpload(
                f"Client {client}: too late: its upload would have come after "
                f"{finished.get(client, pace.seconds(batches[client])):.4g} s of simulated time; the round took "
                f"{ends:.4g} s."
            )
            for client, pace in paces.items()
            if client not in used
        }
        return Plan(ends, {client: cut[client] for client in used if client in cut}, late)


def _read(name: str, latency: float) -> dict[int, Pace]:
    found: dict[int, Pace] = {}
    for line, row in lines_of(option := f"speeds.file={name}", name):
        try:
            client, pace = int(row["client"]), Pace(float(row["batch"]), float(row.get("latency") or latency))
        except (KeyError, TypeError, ValueError):
            client, pace = -1, Pace(math.nan, math.nan)
        if client < 0 or client in found or not (0 <= pace.batch <= LONGEST and 0 <= pace.latency <= LONGEST):
            raise ConfigError(
                f"{option}, line {line}: give the columns client and batch, with one row for every client and seconds "
                "from 0."
            )
        found[client] = pace
    return found
