"""Clients in worker processes, on this machine or on a cluster, by Ray."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pickle import PicklingError
from typing import Any, TypeVar

from joblib import cpu_count
from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.cluster import connect
from lit_pfl.engines.engine import NO_LIMITS, Engine, Trained
from lit_pfl.engines.local import Local
from lit_pfl.engines.parcels import Replies, alike, packed
from lit_pfl.engines.placement import Placement
from lit_pfl.engines.switches import Modes, Switches
from lit_pfl.engines.work import Work
from lit_pfl.engines.worker import Answer, Outer
from lit_pfl.engines.workforce import Handle, Workforce
from lit_pfl.errors import ConfigError, check_options_of, first_line
from lit_pfl.lightning_internals import ASLEEP, Content
from lit_pfl_callbacks.run_folder import run_folder

T = TypeVar("T")
CANNOT_BE_PACKED = (PicklingError, TypeError, AttributeError, RuntimeError, ValueError)
#: how often a client may be lost with its worker in a round: what it computes may be what ends them
LOSSES = 4


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
        awake: how many clients are in memory at most, of all workers together, but at least one in each; the states of
            all lie in files as with :class:`~lit_pfl.engines.Local`, on the machine of the Trainer, and a client's
            state is sent with its work. Default: all are in memory.

    Raises:
        ConfigError: for fewer than one worker or client in memory, for ``awake`` without ``recover``, for a Trainer
            that is not on the CPU, for a method or data that cannot go to another process, and when no worker can be
            started.

    Example::

        Federation(FedAvg(), engine=Ray(workers=4))
    """

    all_at_once = True
    _crew: Workforce
    _placement: Placement[Handle]

    def __init__(
        self,
        workers: PositiveInt | None = None,
        resources: dict[str, float] | None = None,
        address: str | None = None,
        recover: bool = True,
        awake: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        self._keeper = None if awake is None else Local(awake)  # has the files, and no client
        if awake is not None and not recover:
            raise ConfigError(
                "federation.engine.recover=false: federation.engine.awake keeps the states of all clients in files, so "
                "leave one of the two out."
            )
        self.workers, self.address, self.recover, self.awake = workers, address, recover, awake
        check_options_of(self, "federation.engine")
        self.resources = {"num_cpus": 1.0, **(resources or {})}
        self._states: dict[int, Any] = {}  # references to kept states
        self._losses: Counter[int] = Counter()  # by client id: workers that were lost with it in this round
        self._ended = False

    @property
    def cores(self) -> int:
        return max(1, int(self.resources["num_cpus"]))

    # ------------------------------------------------------------------------------------------------------ setting up

    def setup(self, work: Work) -> None:
        self._check_not_ended()
        if (device := work.trainer.strategy.root_device.type) != "cpu":
            raise ConfigError(
                f"trainer.accelerator={device}: with federation.engine=Ray the server is on the CPU, so give cpu; "
                "workers train on GPUs by federation.engine.resources={num_gpus: 1}."
            )
        self.work = work
        if self._keeper is not None:
            self._keeper.setup(work)
            self.files = self._keeper.files
        if hasattr(self, "_placement"):
            self._crew.all(self._set_up)
            return
        wanted, cores = self.workers, self.resources["num_cpus"]
        here = cores * wanted if wanted else cpu_count()
        self.ray = connect(self.address, here)
        self._crew = Workforce(self.ray, self.resources, (sys.path, *self._job(), self.awake), self._set_up, self._lose)
        self._crew.gather(*self._wanted)
        self._placement = Placement({client: work.data.client(client).num_samples for client in work.data.clients})
        self._settle()

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ConfigError("federation.engine: its workers have been ended; make another Federation, and ckpt_path.")

    def _job(self) -> tuple[Any, Any]:
        """Put what every worker gets into Ray's memory: what there is to do, and what of the data is only read."""
        data: Any = copy.copy(self.work.data)
        data.participants = data.validated = None  # methods of the federation
        samples = {name: vars(data).pop(name) for name in getattr(data, "only_read", ())}
        job = self.work.prototype, data, self.work.local_epochs, dict(self.work.options)
        try:
            return self.ray.put(packed(job)), self.ray.put(packed(samples))
        except CANNOT_BE_PACKED as error:
            places = (("model", job[0], "configure_model"), ("federation.client_trainer", job[3], "a callback's setup"))
            what, _, where = next((p for p in places if not _travels(p[1])), ("data", data, "setup"))
            raise ConfigError(
                f"{what}: cannot go to other processes, as federation.engine=Ray needs: {first_line(error)}; make that "
                f"in {where}."
            ) from error

    @property
    def _wanted(self) -> tuple[int | None, int]:
        """How many workers there are to be, and how many there may be."""
        return self.workers, len(self.work.data.clients)

    def _set_up(self, worker: Handle) -> Any:
        work, trainer = self.work, self.work.trainer
        device = "gpu" if self.resources.get("num_gpus") else "cpu"
        folder = str(run_folder(trainer).absolute())
        threads, loggers = work.threads or 1, [type(logger) for logger in trainer.loggers]
        outer = Outer(
            device, trainer.precision, Switches.now(), work.planned, work.seed, threads, folder, loggers,
            work.keep_trained,
        )  # fmt: skip
        return worker.actor.setup.remote(outer)

    # -------------------------------------------------------------------------------------------------------- the verbs

    def joined(self) -> dict[int, ClientInfo]:
        found = self._everybody(lambda worker: worker.actor.joined.remote(self._placement.of(worker)))
        infos = {client: info for own in found.values() for client, info in own.items()}
        initial = alike({client: infos[client].initial for client in self._placement.homes})
        return {client: ClientInfo(infos[client].num_samples, initial[client]) for client in initial}

    def train(
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int] = NO_LIMITS
    ) -> dict[int, Trained]:
        if self._crew.at_work and (self.address is not None or self.recover):
            self._crew.call_up(*self._wanted)
            self._crew.welcome()
        sent = Replies(self.ray, replies)
        self._losses.clear()
        trained: dict[int, Trained] = {}
        while left := self._next(client for client in replies if client not in trained):
            self._settle(left)
            kept: dict[Handle, Any] = {}
            states = self._lacking(left)

            def begin(worker: Handle, some: Sequence[int], kept: Any = kept, states: Any = states) -> Any:
                train = worker.actor.train.options(num_returns=2)
                own = states.get(worker, {})
                answer, kept[worker] = train.remote(*sent.of(some), completed, self.recover, dict(batches), own)
                return answer

            for worker, answer in self._some(begin, left, copy=False).items():
                if self._noted(answer, worker, kept[worker]):
                    trained |= answer.trained
        return {client: trained[client] for client in replies}

    def _noted(self, answer: Answer, worker: Handle, states: Any) -> bool:
        """Note what came of a worker's round; say whether the states are kept, if they are to be."""
        if self.files is not None:
            if (changed := self._crew.fetched(worker, states)) is None:
                return False
            for client, state in changed.items():
                self.files.put(client, state, trained=True)
        elif self.recover:
            states = self._crew.kept(worker, states)
            if states is None:
                return False
            self._states |= dict.fromkeys(answer.trained, states)
        self._placement.seconds |= answer.seconds
        self.left |= answer.left
        return True

    def ask(self, question: Callable[[Client], T], replies: Mapping[int, Payload | None]) -> dict[int, T]:
        asked, sent, modes = self.ray.put(packed(question)), Replies(self.ray, replies), Modes.now("cpu")
        answers: dict[int, T] = {}
        self._losses.clear()
        while left := self._next(client for client in replies if client not in answers):
            self._settle()
            states = self._lacking(left)

            def put(worker: Handle, some: Sequence[int], states: Any = states) -> Any:
                return worker.actor.ask.remote(asked, *sent.of(some), modes, states.get(worker, {}))

            found = self._some(put, left)
            answers |= {client: answer for own in found.values() for client, answer in own.items()}
        return {client: answers[client] for client in replies}

    def state_dict(self) -> dict[str, Any]:
        if self._keeper is not None:
            self._keeper.left = self.left
            return self._keeper.state_dict()
        found = self._everybody(lambda worker: worker.actor.states.remote())
        parts = {key: {k: v for own in found.values() for k, v in own[key].items()} for key in ("clients", "streams")}
        left = {"left": dict.fromkeys(sorted(self.left))} if self.left else {}
        ordered = {key: {k: part[k] for k in self._placement.homes if k in part} for key, part in parts.items()}
        return {**ordered, **left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.work.seed = state.get("seed", self.work.seed)
        self.left = set(state.get("left", ()))
        if self._keeper is not None:
            self._keeper.load_state_dict(state)
            self._crew.all(lambda worker: worker.actor.renew.remote(self.work.seed))
            return

        def load(worker: Handle) -> Any:
            own = self._placement.of(worker)
            part = {key: state[key] for key in ("seed", "left", ASLEEP) if key in state}
            for key in ("clients", "streams", *(["constant"] if ASLEEP in state else [])):
                there = own if key == "clients" and ASLEEP not in state else [k for k in own if k in state[key]]
                part[key] = {client: state[key][client] for client in there}
            reference = self.ray.put(packed(part))
            self._states |= dict.fromkeys(own, reference)
            return worker.actor.load.remote(reference)

        self._settle()
        self._crew.all(load)

    def stop(self) -> None:
        self._crew.all(lambda worker: worker.actor.stop.remote())

    def abort(self) -> None:
        self._ended = hasattr(self, "_placement")
        if hasattr(self, "_crew"):
            self._crew.end()
        self._states.clear()

    # ------------------------------------------------------------------------------------------------- who has whom

    def of_workers(self) -> list[list[int]]:
        """Return the ids of the clients that each worker has, which may be others after the next round."""
        return [self._placement.of(worker) for worker in self._crew.at_work]

    def _settle(self, training: Iterable[int] = ()) -> None:
        """Give clients homes that have lost theirs; where some are to train, such that all workers have work."""
        self._check_not_ended()
        while True:
            if not self._crew.at_work:
                self._crew.wait_for_one(*self._wanted)
            moving = self._placement.moves(self._crew.at_work, training, self.recover)
            if not moving or self._moved(moving):
                return

    def _moved(self, moving: Mapping[int, Handle]) -> bool:
        """Let clients move; say whether all have arrived."""
        homes = self._placement.homes
        former = {client: homes[client] for client in moving}
        homes |= dict.fromkeys(moving)  # at home nowhere, should something be lost on the way

        def bring(worker: Handle) -> Any:
            come = [client for client, home in moving.items() if home is worker]
            go = [client for client, home in former.items() if home is worker]
            kept = list(dict.fromkeys(self._states[client] for client in come if client in self._states))
            places = {client: kept.index(self._states[client]) if client in self._states else None for client in come}
            return worker.actor.bring.remote(places, go, *kept)

        touched = {*moving.values(), *(home for home in former.values() if home is not None)}
        arrived = self._crew.answers({worker: bring(worker) for worker in self._crew.at_work if worker in touched})
        homes |= {client: home for client, home in moving.items() if home in arrived}
        return self._placement.complete

    def _lose(self, worker: Handle, error: Exception) -> None:
        clients, why = self._placement.of(worker), type(error).__name__
        if not self.recover:
            raise RuntimeError(
                f"A worker on {worker.where} is lost ({why}), and federation.engine.recover=false keeps no states of "
                "its clients; continue from the last checkpoint."
            ) from error
        self._losses.update(clients)
        self._placement.homes |= dict.fromkeys(clients)  # without a home
        if often := [client for client in clients if self._losses[client] > LOSSES]:
            some = ", ".join(map(str, often[:10])) + (", ..." if len(often) > 10 else "")
            raise RuntimeError(
                f"federation.engine=Ray: {LOSSES + 1} workers were lost in one round, all with client {some}: what it "
                "computes may end its process, or need more memory than there is."
            ) from error
        rank_zero_warn(
            f"A worker on {worker.where} is lost ({why}); its {len(clients)} clients continue from where they were at "
            "the start of the round, in other workers."
        )

    # ------------------------------------------------------------------------------------------------ who is in memory

    def _next(self, clients: Iterable[int]) -> list[int]:
        """Return the clients that come next: all, or as many as may be in memory, since as many states are sent."""
        return list(islice(clients, self.awake))

    def _lacking(self, clients: Sequence[int]) -> dict[Handle, dict[int, Content | None]]:
        """Return the states of those clients that are not in the memory of their workers, by worker and id."""
        if self.files is None or self.awake is None:
            return {}
        share = max(1, self.awake // len(self._crew.at_work))
        lacking = self._some(lambda worker, some: worker.actor.lacks.remote(some, share), clients)
        return {worker: {client: self.files.read(client) for client in own} for worker, own in lacking.items()}

    # ------------------------------------------------------------------------------------------------- calling workers

    def _some(
        self, call: Callable[[Handle, list[int]], Any], clients: Sequence[int], copy: bool = True
    ) -> dict[Handle, Any]:
        """Call those workers that have some of the clients, with these; return their answers."""
        homes = self._placement.homes
        own = {worker: [client for client in clients if homes[client] is worker] for worker in self._crew.at_work}
        return self._crew.answers({worker: call(worker, some) for worker, some in own.items() if some}, copy)

    def _everybody(self, call: Callable[[Handle], Any]) -> dict[Handle, Any]:
        """Call all workers until the answers are about all clients."""
        self._losses.clear()
        while True:
            self._settle()
            answers = self._crew.all(call)
            if self._placement.complete:
                return answers


def _travels(thing: Any) -> bool:
    """Say whether a thing can go to another process."""
    try:
        packed(thing)
    except CANNOT_BE_PACKED:
        return False
    return True
