"""Clients in worker processes, on this machine or on a cluster, by Ray."""

import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.cluster import connect
from lit_pfl.engines.engine import NO_LIMITS, Engine, Trained
from lit_pfl.engines.parcels import alike, packed, unpacked
from lit_pfl.engines.trainers import planned_rounds
from lit_pfl.engines.work import Work
from lit_pfl.engines.worker import Answer, Failure, Modes, Outer, Worker
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import ASLEEP
from lit_pfl_callbacks.run_folder import run_folder

T = TypeVar("T")
#: seconds to wait for further workers at the start, once there is one
GATHERING = 60.0
#: how much more than its share of a round's work a worker may have before a client of it moves to another
SLACK = 1.2


class Ray(Engine):
    """Trains clients in worker processes: on all cores of this machine, or on the machines of a Ray cluster.

    Every worker trains its clients one after another. Weights, scores and checkpoints are those of
    :class:`~lit_pfl.engines.Local` with the same ``threads``, whoever trains whom. Clients go to workers by the time
    that they take, as measured, the longest first. The server and all callbacks are in the process that has the
    Trainer, on the CPU.

    A worker that is lost costs time only: others train its clients' round again, from their states before it. A worker
    that joins is used from the next round on.

    Args:
        workers: number of worker processes; by default as many as there are cores, or resources.
        resources: what a worker takes, by Ray's names: ``{num_gpus: 0.25}`` lets four share a GPU. By default one core
            (``num_cpus``).
        address: of a Ray cluster, ``auto`` for the one that this machine belongs to. By default Ray is started on this
            machine alone, where nobody can reach it from outside, and ends with this process.
        recover: whether the states of clients are kept in Ray's memory, so that a lost worker's clients can train
            elsewhere, and clients move to workers that have less to do.

    Raises:
        ConfigError: for fewer than one worker, for a Trainer that is not on the CPU, for a method or data that cannot
            go to another process, and when no worker can be started.

    Example::

        Federation(FedAvg(), engine=Ray(workers=4))
    """

    all_at_once = True

    def __init__(
        self,
        workers: PositiveInt | None = None,
        resources: dict[str, float] | None = None,
        address: str | None = None,
        recover: bool = True,
    ) -> None:
        super().__init__()
        if workers is not None and workers < 1:
            raise ConfigError(f"federation.engine.workers={workers}: give 1 or more.")
        self.workers, self.address, self.recover = workers, address, recover
        self.resources = {"num_cpus": 1.0, **(resources or {})}
        self._hands: list[Hand] = []  # at work
        self._coming: list[Hand] = []  # being started
        self._homes: dict[int, Hand | None] = {}  # None: of a worker that is lost
        self._states: dict[int, Any] = {}  # references to kept states
        self._samples: dict[int, int] = {}
        self._seconds: dict[int, float] = {}  # of a client's latest round
        self._ended = False

    @property
    def cores(self) -> int:  # noqa: D102
        return max(1, int(self.resources["num_cpus"]))

    # ------------------------------------------------------------------------------------------------------ setting up

    def setup(self, work: Work) -> None:  # noqa: D102
        if self._ended:
            raise ConfigError("federation.engine: its workers have been ended; make another Federation, and ckpt_path.")
        if (device := work.trainer.strategy.root_device.type) != "cpu":
            raise ConfigError(
                f"trainer.accelerator={device}: with federation.engine=Ray the server is on the CPU, so give cpu; "
                "workers train on GPUs by federation.engine.resources={num_gpus: 1}."
            )
        self.work = work
        if self._homes:
            self._all(lambda hand: hand.actor.setup.remote(self._outer(), []))
            return
        self._start()
        self._samples = {client: work.data.client(client).num_samples for client in work.data.clients}
        dealt = assigned(self._samples, {}, len(self._hands))
        self._homes = {client: self._hands[place] for client, place in dealt.items()}
        self._all(lambda hand: hand.actor.setup.remote(self._outer(), self._of(hand)))

    def _start(self) -> None:
        """Start Ray and the workers, and wait for them."""
        wanted, cores = self.workers, self.resources["num_cpus"]
        here = cores * wanted if wanted else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.ray = connect(self.address, here)
        data: Any = copy.copy(self.work.data)
        data.participants = data.validated = None  # methods of the federation
        samples = {name: vars(data).pop(name) for name in getattr(data, "only_read", ())}
        job = self.work.prototype, data, self.work.local_epochs, dict(self.work.options)
        try:
            self._job = self.ray.put(packed(job)), self.ray.put(packed(samples))
        except (TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ConfigError(f"federation.engine=Ray: method and data must go to other processes: {error}.") from error
        options = {key: value for key, value in self.resources.items() if key in ("num_cpus", "num_gpus", "memory")}
        more = {key: value for key, value in self.resources.items() if key not in options}
        self._kind = self.ray.remote(Worker).options(**options, resources=more, max_restarts=0)
        self._call_up()
        self.ray.wait([hand.ready for hand in self._coming])
        self.ray.wait([hand.ready for hand in self._coming], num_returns=len(self._coming), timeout=GATHERING)
        self._welcome()
        if not self._hands:
            raise ConfigError("federation.engine=Ray: no worker could be started; its logs say why.")

    def _call_up(self) -> None:
        """Start as many workers as there are to be."""
        wanted = self.workers
        if wanted is None:
            there = self.ray.cluster_resources()
            names = {"num_cpus": "CPU", "num_gpus": "GPU"}
            fit = [int(there.get(names.get(k, k), 0) // v) for k, v in self.resources.items() if v]
            wanted = max(1, min(fit, default=1))
        for _ in range(min(wanted, len(self.work.data.clients)) - len(self._hands) - len(self._coming)):
            actor = self._kind.remote(sys.path, *self._job)
            self._coming.append(Hand(actor, actor.ready.remote()))

    def _welcome(self) -> None:
        """Take in those workers that have come."""
        for hand in list(self._coming):
            if not self.ray.wait([hand.ready], timeout=0)[0]:
                continue
            self._coming.remove(hand)
            try:
                hand.where = self.ray.get(hand.ready)
                if self._homes:
                    self._opened(self.ray.get(hand.actor.setup.remote(self._outer(), [])))
            except self.ray.exceptions.RayError as error:
                rank_zero_warn(f"A worker could not be started: {str(error).strip().splitlines()[-1]}")
                continue
            self._hands.append(hand)

    def _outer(self) -> Outer:
        work, trainer = self.work, self.work.trainer
        device = "gpu" if self.resources.get("num_gpus") else "cpu"
        rounds = planned_rounds(trainer) if work.rounds is None else work.rounds
        deterministic, folder = torch.are_deterministic_algorithms_enabled(), str(run_folder(trainer).absolute())
        return Outer(device, trainer.precision, deterministic, rounds, work.seed, work.threads or 1, folder)

    # -------------------------------------------------------------------------------------------------------- the verbs

    def joined(self) -> dict[int, ClientInfo]:  # noqa: D102
        found = self._everybody(lambda hand: hand.actor.joined.remote())
        infos = {client: info for own in found.values() for client, info in own.items()}
        initial = alike({client: infos[client].initial for client in self._homes})
        return {client: ClientInfo(infos[client].num_samples, initial[client]) for client in self._homes}

    def train(  # noqa: D102
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int] = NO_LIMITS
    ) -> dict[int, Trained]:
        if self._hands and (self.address is not None or self.recover):
            self._call_up()
            self._welcome()
        sent = self._sent(replies)
        trained: dict[int, Trained] = {}
        while left := [client for client in replies if client not in trained]:
            self._settle(left)
            kept: dict[Hand, Any] = {}

            def begin(hand: Hand, some: Sequence[int], kept: dict[Hand, Any] = kept) -> Any:
                distinct, which = sent(some)
                train = hand.actor.train.options(num_returns=2)
                answer, kept[hand] = train.remote(distinct, which, completed, self.recover, dict(batches))
                return answer

            for hand, answer in self._some(begin, left, copy=False).items():
                self._note(answer, kept[hand])
                trained |= answer.trained
        return {client: trained[client] for client in replies}

    def _note(self, answer: Answer, states: Any) -> None:
        self._seconds |= answer.seconds
        self.left |= answer.left
        if self.recover:
            self._states |= dict.fromkeys(answer.trained, states)

    def ask(self, question: Callable[[Client], T], replies: Mapping[int, Payload | None]) -> dict[int, T]:  # noqa: D102
        asked, sent, modes = self.ray.put(packed(question)), self._sent(replies), Modes.now("cpu")
        answers: dict[int, T] = {}
        while left := [client for client in replies if client not in answers]:
            self._settle()
            found = self._some(lambda hand, some: hand.actor.ask.remote(asked, *sent(some), modes), left)
            answers |= {client: answer for own in found.values() for client, answer in own.items()}
        return {client: answers[client] for client in replies}

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        found = self._everybody(lambda hand: hand.actor.states.remote())
        parts = {key: {k: v for own in found.values() for k, v in own[key].items()} for key in ("clients", "streams")}
        left = {"left": dict.fromkeys(sorted(self.left))} if self.left else {}
        ordered = {key: {k: part[k] for k in self._homes if k in part} for key, part in parts.items()}
        return {**ordered, **left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.work.seed = state.get("seed", self.work.seed)
        self.left = set(state.get("left", ()))

        def load(hand: Hand) -> Any:
            own = self._of(hand)
            part = {key: state[key] for key in ("seed", "left", ASLEEP) if key in state}
            for key in ("clients", "streams", *(["constant"] if ASLEEP in state else [])):
                there = own if key == "clients" and ASLEEP not in state else [k for k in own if k in state[key]]
                part[key] = {client: state[key][client] for client in there}
            reference = self.ray.put(packed(part))
            self._states |= dict.fromkeys(own, reference)
            return hand.actor.load.remote(reference)

        self._settle()
        self._all(load)

    def stop(self) -> None:  # noqa: D102
        self._all(lambda hand: hand.actor.stop.remote())

    def abort(self) -> None:  # noqa: D102
        self._ended = bool(self._homes) or self._ended
        for hand in [*self._hands, *self._coming]:
            self.ray.kill(hand.actor)
        self._hands, self._coming, self._homes = [], [], dict.fromkeys(self._homes)
        self._states.clear()

    # ------------------------------------------------------------------------------------------------- who has whom

    def of_workers(self) -> list[list[int]]:
        """Return the ids of the clients that each worker has, which may be others after the next round."""
        return [self._of(hand) for hand in self._hands]

    def _of(self, hand: "Hand") -> list[int]:
        return [client for client, home in self._homes.items() if home is hand]

    def _settle(self, training: Iterable[int] = ()) -> None:
        """Give clients homes that have lost theirs; where some are to train, such that all workers have work.

        Args:
            training: ids of clients that are about to train.
        """
        while True:
            while not self._hands:
                self._wait_for_one()
            places = {hand: place for place, hand in enumerate(self._hands)}
            homes = {client: None if home is None else places[home] for client, home in self._homes.items()}
            some = dict.fromkeys([*training, *(client for client, home in homes.items() if home is None)])
            moves = self.recover or None in homes.values()
            dealt = assigned(self._expected(some), homes, len(self._hands), SLACK if moves else float("inf"))
            moving = {client: self._hands[place] for client, place in dealt.items() if place != homes[client]}
            if not moving or self._moved(moving):
                return

    def _expected(self, clients: Iterable[int]) -> dict[int, float]:
        """Return how long clients are likely to take, in seconds, or before any have trained in samples."""
        known = sum(self._samples[client] for client in self._seconds)
        each = sum(self._seconds.values()) / known if known else 1.0
        return {client: self._seconds.get(client, each * self._samples[client]) for client in clients}

    def _moved(self, moving: Mapping[int, "Hand"]) -> bool:
        """Let clients move; say whether all have arrived."""
        former = {client: self._homes[client] for client in moving}
        self._homes |= dict.fromkeys(moving)  # at home nowhere, should something be lost on the way

        def bring(hand: Hand) -> Any:
            come = [client for client, home in moving.items() if home is hand]
            go = [client for client, home in former.items() if home is hand]
            kept = list(dict.fromkeys(self._states[client] for client in come if client in self._states))
            places = {client: kept.index(self._states[client]) if client in self._states else None for client in come}
            return hand.actor.bring.remote(places, go, *kept)

        touched = {*moving.values(), *(home for home in former.values() if home is not None)}
        arrived = self._gathered({hand: bring(hand) for hand in self._hands if hand in touched})
        self._homes |= {client: home for client, home in moving.items() if home in arrived}
        return None not in self._homes.values()

    def _wait_for_one(self) -> None:
        """Wait for a worker where none is left."""
        self._call_up()
        self.ray.wait([hand.ready for hand in self._coming])
        self._welcome()
        if not self._hands and not self._coming:
            raise RuntimeError("federation.engine=Ray: all workers are lost, and no other can be started.")

    def _lose(self, hand: "Hand", error: Exception) -> None:
        clients = self._of(hand)
        if not self.recover:
            raise RuntimeError(
                f"A worker on {hand.where} is lost ({_line(error)}), and federation.engine.recover=false keeps no "
                "states of its clients; continue from the last checkpoint."
            ) from error
        rank_zero_warn(
            f"A worker on {hand.where} is lost ({_line(error)}); its {len(clients)} clients continue from where they "
            "were at the start of the round, in other workers."
        )
        self._hands.remove(hand)
        self._homes |= dict.fromkeys(clients)

    # ------------------------------------------------------------------------------------------------- calling workers

    def _sent(self, replies: Mapping[int, Payload | None]) -> Callable[[Sequence[int]], tuple[Any, dict[int, Any]]]:
        """Return what gives the replies of some clients, distinct ones, and by client which it is.

        One reply for all is put into Ray's memory once.
        """
        distinct = {id(reply): reply for reply in replies.values() if reply is not None}
        common = self.ray.put(packed(list(distinct.values()))) if len(distinct) <= 1 else None

        def sent(some: Sequence[int]) -> tuple[Any, dict[int, Any]]:
            own = {id(replies[client]): replies[client] for client in some if replies[client] is not None}
            places = {key: place for place, key in enumerate(own)}
            which = {client: places.get(id(replies[client])) for client in some}
            return (self.ray.put(packed(list(own.values()))) if common is None else common), which

        return sent

    def _some(
        self, call: Callable[["Hand", list[int]], Any], clients: Sequence[int], copy: bool = True
    ) -> dict["Hand", Any]:
        """Call those workers that have some of the clients, with these; return their answers."""
        own = {hand: [client for client in clients if self._homes[client] is hand] for hand in self._hands}
        return self._gathered({hand: call(hand, some) for hand, some in own.items() if some}, copy)

    def _all(self, call: Callable[["Hand"], Any]) -> dict["Hand", Any]:
        """Call all workers; return their answers."""
        return self._gathered({hand: call(hand) for hand in self._hands})

    def _everybody(self, call: Callable[["Hand"], Any]) -> dict["Hand", Any]:
        """Call all workers until the answers are about all clients."""
        while True:
            self._settle()
            answers = self._all(call)
            if None not in self._homes.values():
                return answers

    def _gathered(self, references: Mapping["Hand", Any], copy: bool = True) -> dict["Hand", Any]:
        """Return the answers that have come, without those of workers that are lost."""
        if references:
            self.ray.wait(list(references.values()), num_returns=len(references))
        answers = {}
        for hand, reference in references.items():
            try:
                answers[hand] = self._opened(self.ray.get(reference), copy)
            except self.ray.exceptions.RayError as error:
                self._lose(hand, error)
        return answers

    def _opened(self, parcel: Any, copy: bool = True) -> Any:
        """Return what is in an answer; raise the error if it is one."""
        answer = unpacked(parcel, copy)
        if isinstance(answer, Failure):
            answer.error.add_note(f"(in a worker: {answer.where})")
            raise answer.error
        return answer


class Hand:
    """A worker as its engine sees it.

    Args:
        actor: Ray's handle.
        ready: a reference to the name of its machine, there once it is at work.
    """

    where = "a machine"

    def __init__(self, actor: Any, ready: Any) -> None:
        self.actor, self.ready = actor, ready


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


def _line(error: Exception) -> str:
    return type(error).__name__
