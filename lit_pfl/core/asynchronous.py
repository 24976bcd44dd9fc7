"""Servers that do not wait: uploads count as they come, less the older the model is that they were trained from."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lit_pfl.core.client import Client
from lit_pfl.core.deadline import Speeds
from lit_pfl.core.participation import named
from lit_pfl.core.payload import Payload
from lit_pfl.core.payload_state import payload_from, payload_state
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import NORM_STATISTICS
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.randomness import Draws, number_of


class Asynchronous(ABC):
    """Takes a server's step whenever some uploads have come: ``Federation(..., asynchronous=FedBuff())``.

    A round is a step of the server, and ``federation.participation`` the number of clients that train at the same time:
    whenever one has uploaded, another one begins, with the model of that moment. The *staleness* of an upload is the
    number of steps that the server has taken since its client began. For methods whose server uses the mean of the
    uploads and nothing else.

    Args:
        buffer: number of uploads that make a step.
        speeds: how long clients take. Default: see :class:`~lit_pfl.core.deadline.Speeds`.
    """

    def __init__(self, buffer: int, speeds: Speeds | None = None) -> None:
        if buffer < 1:
            raise ConfigError(f"federation.asynchronous.buffer={buffer}: give 1 or more.")
        self.buffer, self.speeds = int(buffer), speeds or Speeds()

    __repr__ = named

    @abstractmethod
    def counted(self, upload: Payload, began: Payload, model: Mapping[str, Tensor], staleness: int) -> Payload:
        """Return an upload as it counts in the mean.

        Args:
            upload: as it was sent.
            began: the model that the client began with.
            model: the server's present model; that one, if the staleness is 0.
            staleness: number of steps in between.
        """

    @property
    def in_full(self) -> bool:
        """Whether every update counts in full, however late it comes."""
        return False

    def check(self, client: Client, server: Server, clients: Sequence[int], participation: object) -> None:
        """See that a method's client and server, all clients' ids and the option ``participation`` fit."""
        if client.needs_full_steps and not self.in_full:
            raise ConfigError(
                f"federation.asynchronous: a client of {type(client).__name__} {client.needs_full_steps}, so that its "
                "upload must count in full; use FedBuff with exponent=0."
            )
        if not server.declares("means_only"):
            raise ConfigError(
                f"federation.asynchronous: {server.sees_uploads()} uses single uploads, not their mean alone; use a "
                "method that averages, such as FedAvg or Ditto."
            )
        if type(server).center is not Server.center:
            raise ConfigError(
                f"federation.asynchronous: uploads to {type(server).__name__} are no models, so nobody knows what late "
                "ones count; use a method whose clients upload models, such as FedAvg or Ditto."
            )
        if not isinstance(participation, int | float):
            raise ConfigError(
                f"federation.participation={participation!r}: with federation.asynchronous, give the share or the "
                "number of clients that train at the same time."
            )
        if self.buffer > len(clients):
            raise ConfigError(f"federation.asynchronous.buffer={self.buffer} is more than the {len(clients)} clients.")
        self.speeds.check(clients)


class FedBuff(Asynchronous):
    """Buffered asynchronous aggregation: ``w <- w + sum p_i (w_i - b_i) / (1 + t_i) ** exponent``.

    w_i is an upload, b_i the model that its client began with, and t_i its staleness. p_i are the averaging weights of
    the server, by numbers of samples as usual; the paper's Algorithm 1 has 1 / buffer. The paper's learning rate of
    the server, and its momentum, are ``model.server_optimizer=ServerMomentum``. With a buffer of all participants, who
    then have no staleness, this is the method itself bit for bit.

    Args:
        buffer: number of uploads that make a step, the paper's K.
        exponent: how much less stale uploads count.
        speeds: see :class:`Asynchronous`.

    Source:
        Nguyen et al. 2022, Algorithm 1; the staleness weights of its experiments.
    """

    def __init__(
        self, buffer: PositiveInt = 10, exponent: NonNegativeFloat = 0.5, speeds: Speeds | None = None
    ) -> None:
        super().__init__(buffer, speeds)
        self.exponent = exponent
        check_options_of(self, "federation.asynchronous")

    @property
    def in_full(self) -> bool:
        return self.exponent == 0

    def counted(self, upload: Payload, began: Payload, model: Mapping[str, Tensor], staleness: int) -> Payload:
        if staleness == 0:
            return upload
        return _moved(upload, began, model, (1 + staleness) ** -self.exponent)


class FedAsync(Asynchronous):
    """Asynchronous aggregation of single uploads: ``w <- (1 - c) w + c w_i`` with ``c = mixing * s(t)``.

    t is the staleness, and s(t) one of: ``constant``: 1; ``polynomial``: ``(t + 1) ** -a``; ``hinge``: 1 up to a
    staleness of b, then ``1 / (a (t - b) + 1)``. The paper's proximal term is the method ``FedProx``. With one client
    at a time and ``mixing=1`` this is the method itself with one participant, bit for bit.

    Args:
        mixing: how much a fresh upload counts, the paper's alpha.
        function: which s.
        a: see s; the paper has 0.5 for ``polynomial`` and 10 for ``hinge``.
        b: see s.
        speeds: see :class:`Asynchronous`.

    Source:
        Xie et al. 2019 (Asynchronous Federated Optimization), Algorithm 1 and its staleness functions.
    """

    def __init__(
        self,
        mixing: ClosedUnitInterval = 0.6,
        function: Literal["constant", "polynomial", "hinge"] = "polynomial",
        a: NonNegativeFloat = 0.5,
        b: NonNegativeInt = 4,
        speeds: Speeds | None = None,
    ) -> None:
        super().__init__(1, speeds)
        self.mixing, self.function, self.a, self.b = mixing, function, a, b
        check_options_of(self, "federation.asynchronous")

    def counted(self, upload: Payload, began: Payload, model: Mapping[str, Tensor], staleness: int) -> Payload:
        share = self.mixing * STALENESS[self.function](staleness, self.a, self.b)
        return upload if share == 1 else _moved(upload, model, model, share)


#: what an upload counts, by its staleness t and the numbers a and b
STALENESS: dict[str, Callable[[int, float, int], float]] = {
    "constant": lambda t, a, b: 1.0,
    "polynomial": lambda t, a, b: (t + 1) ** -a,
    "hinge": lambda t, a, b: 1.0 if t <= b else 1 / (a * (t - b) + 1),
}


def _moved(upload: Payload, start: Mapping[str, Tensor], model: Mapping[str, Tensor], share: float) -> Payload:
    """Return ``model + share (upload - start)``; whole numbers, and what is new in the upload, stay as they are.

    Running statistics go a share of the way to the upload's: a variance plus a difference could be negative.
    """
    moved = {}
    for name, own in upload.items():
        if name in start and name in model and own.is_floating_point():
            from_ = model if name.rpartition(".")[2] in NORM_STATISTICS else start
            moved[name] = (model[name] + share * (own.double() - from_[name])).to(own.dtype)
    return upload.with_(moved)


class Step(NamedTuple):
    """A step of the server.

    Args:
        starts: clients that begin between the step before and this one.
        staleness: that of the uploads that make the step, by client id.
        clock: simulated seconds since the start.
    """

    starts: list[int]
    staleness: dict[int, int]
    clock: float


class Schedule:
    """Who begins and who uploads when. It depends on the seed alone, so that a resumed run has the same.

    Args:
        asynchronous: the option.
        batches: number of batches of a whole round, by client id.
        concurrency: share or number of the clients that train at the same time.
        draws: source of all randomness.
    """

    def __init__(
        self, asynchronous: Asynchronous, batches: Mapping[int, int], concurrency: float, draws: Draws
    ) -> None:
        self._steps: list[Step] = []
        self._more = _steps(asynchronous, batches, concurrency, draws)

    def step(self, completed: int) -> Step:
        """Return the step after this many others."""
        while len(self._steps) <= completed:
            self._steps.append(next(self._more))
        return self._steps[completed]


def _steps(asynchronous: Asynchronous, batches: Mapping[int, int], concurrency: float, draws: Draws) -> Iterator[Step]:
    clients = sorted(batches)
    at_once = number_of(concurrency, len(clients))
    training: list[tuple[float, int, int]] = []  # a heap of when an upload comes, whose, and of the step before it
    begun = count()
    clock = 0.0

    def begin(number: int, step: int, *purpose: str | int) -> list[int]:
        """Let some clients begin that neither train nor wait for the step."""
        busy = {client for _, client, _ in training} | staleness.keys()
        free = [client for client in clients if client not in busy]
        if number < len(free):
            places = draws.generator(*purpose).choice(len(free), number, replace=False)
            free = [free[place] for place in sorted(places)]
        for client in free:
            pace = asynchronous.speeds.of(client, next(begun), draws)
            heapq.heappush(training, (clock + pace.seconds(batches[client]), client, step))
        return free

    for step in count():
        staleness: dict[int, int] = {}
        starts = begin(at_once - len(training), step, "participation", step)
        while len(staleness) < asynchronous.buffer:
            # whoever comes at the same moment is taken in before others begin
            if not training or training[0][0] > clock:
                starts += begin(at_once - len(training), step, "replacement", step, len(staleness))
            clock, client, then = heapq.heappop(training)
            staleness[client] = step - then
        yield Step(starts, staleness, clock)


class InTraining:
    """The clients that train while the server continues, and the models that they have begun with.

    Args:
        asynchronous: what their uploads count.

    Attributes:
        models: by client id.
    """

    def __init__(self, asynchronous: Asynchronous) -> None:
        self.asynchronous = asynchronous
        self.models: dict[int, Payload] = {}
        self._staleness: Mapping[int, int] = {}

    def begin(self, replies: Mapping[int, Payload], staleness: Mapping[int, int]) -> None:
        """Let clients begin.

        Args:
            replies: what they begin with, by id.
            staleness: that of the uploads that the present round waits for, by client id.
        """
        self._staleness = staleness
        copies = {id(reply): reply.clone() for reply in replies.values()}  # one of each, as the server goes on
        self.models |= {client: copies[id(reply)] for client, reply in replies.items()}

    def counted(self, uploads: Mapping[int, Payload], server: Server) -> dict[int, Payload]:
        """Return a round's uploads as they count, by client id; who was waited for has ended its training."""
        began = {client: self.models.pop(client) for client in self._staleness if client in self.models}
        return {
            k: self.asynchronous.counted(upload, began[k], server.center(k, upload), self._staleness[k])
            for k, upload in uploads.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the models as plain values, each once."""
        models = {id(payload): payload for payload in self.models.values()}
        places = {key: place for place, key in enumerate(models)}
        return {
            "models": [payload_state(payload) for payload in models.values()],
            "clients": {client: places[id(payload)] for client, payload in self.models.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        models = [payload_from(one) for one in state["models"]]
        self.models = {client: models[place] for client, place in state["clients"].items()}
