"""Some of a federation's clients, in a process that another one commands."""

import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import Logger

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.answers import carefully, keep_warnings
from lit_pfl.engines.asleep import Carried
from lit_pfl.engines.client_logger import ElsewhereLogger
from lit_pfl.engines.engine import Trained
from lit_pfl.engines.local import Local
from lit_pfl.engines.parcels import Parcel, alike, packed, unpacked
from lit_pfl.engines.switches import Modes, Switches
from lit_pfl.engines.threads import keep_freed_memory
from lit_pfl.engines.work import Work
from lit_pfl.lightning_internals import Content, undisturbed
from lit_pfl.randomness import random_state_kept
from lit_pfl_callbacks.rank_zero import be_rank_zero


@dataclass(frozen=True)
class Outer:
    """What a worker knows of the federation's Trainer.

    Args:
        accelerator: where clients train.
        precision: in which they train.
        switches: PyTorch's own of the whole process.
        rounds: number of rounds that are planned, or -1.
        seed: the federation's seed.
        threads: CPU threads that clients compute with.
        folder: the run's folder.
        loggers: what its loggers are.
        keep_trained: see :class:`~lit_pfl.engines.Work`.
    """

    accelerator: str
    precision: Any
    switches: Switches
    rounds: int
    seed: int
    threads: int
    folder: str
    loggers: Sequence[type[Logger]]
    keep_trained: bool

    def trainer(self) -> L.Trainer:
        """Return a Trainer like it."""
        quiet: dict[str, Any] = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "logger"), False)
        with undisturbed():
            trainer = L.Trainer(
                accelerator=self.accelerator, devices=1, precision=self.precision, default_root_dir=self.folder,
                enable_model_summary=False, **quiet,
            )  # fmt: skip
        trainer.loggers = [ElsewhereLogger(self.folder, kind) for kind in self.loggers]
        return trainer


class Answer(NamedTuple):
    """What comes of a worker's round.

    Args:
        trained: by client id.
        seconds: how long each client took.
        left: ids of those clients whose training has ended.
    """

    trained: dict[int, Trained]
    seconds: dict[int, float]
    left: set[int]


class Worker:
    """Has clients in an engine :class:`~lit_pfl.engines.Local`. Arguments and answers are parcels.

    Args:
        path: where the commanding process finds its modules.
        job: prototype, data, local epochs and options of the clients' Trainers.
        samples: what of the data is only read.
        awake: how many clients are in memory at most; None for all.
    """

    def __init__(self, path: Sequence[str], job: Parcel, samples: Parcel, awake: int | None = None) -> None:
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        be_rank_zero()  # also on the second of the machines on which srun has started Ray
        keep_freed_memory()
        self.warned = keep_warnings()
        self.prototype, self.data, self.epochs, self.options = unpacked(job)
        vars(self.data).update(unpacked(samples, copy=False))
        self.carried, self.awake = Carried(), awake
        self.engine = Local(awake)
        self._kept: Parcel | None = None  # states after the latest round

    def ready(self) -> tuple[str, str]:
        """Return the names of the machine and of its node of Ray, once the process is at work."""
        import ray

        return platform.node(), ray.get_runtime_context().get_node_id()

    @carefully
    def setup(self, outer: Outer) -> None:
        """Take note of the Trainer."""
        torch.set_num_threads(outer.threads)
        outer.switches.apply()
        trainer = outer.trainer()
        self.device = trainer.strategy.root_device.type
        if not hasattr(self, "work"):
            self.data.move_to(trainer.strategy.root_device)
            self.work = Work(
                self.prototype, self.data, outer.seed, self.epochs, self.options, trainer, outer.rounds, outer.threads,
                outer.keep_trained,
            )  # fmt: skip
        self.work.goes_on(trainer, outer.rounds)
        self.engine.setup(self.work, [], self.carried)

    @carefully
    def joined(self, own: Sequence[int]) -> dict[int, ClientInfo]:
        """Return what the clients that live here send on joining."""
        infos = self.engine.joined(own)
        initial = alike({client: info.initial for client, info in infos.items()})
        return {client: ClientInfo(info.num_samples, initial[client]) for client, info in infos.items()}

    @carefully
    def bring(self, come: Mapping[int, int | None], go: Sequence[int], *states: Parcel) -> None:
        """Take in clients that lived elsewhere, and let others go.

        Args:
            come: by client id which of the states has it; None for one that is as it was made.
            go: ids of clients that live elsewhere now.
            states: states of :meth:`~lit_pfl.engines.Local.states`.
        """
        for client in go:
            self.engine.drop(client)
        if self.awake is not None:  # each is made when it is needed
            return
        self.engine.make(come)
        with random_state_kept():
            for client in come:
                self.work.joined(self.engine.clients[client])  # which may give its tensors their shapes
        for number, state in enumerate(states):
            self.engine.take_up(unpacked(state), [client for client, place in come.items() if place == number])

    @carefully
    def lacks(self, clients: Sequence[int], awake: int) -> list[int]:
        """Return which of the clients that are to work next are not in memory.

        Args:
            clients: their ids.
            awake: how many are to be in memory at most from now on.
        """
        assert self.engine.asleep is not None
        self.engine.asleep.awake = awake
        return [client for client in clients if client not in self.engine.clients]

    def _in_turn(self, clients: Iterable[int]) -> list[int]:
        """Return clients in the order in which they work: first those in memory, before others take their places."""
        return sorted(clients, key=lambda client: client not in self.engine.clients)

    def train(
        self, replies: Parcel, which: Mapping[int, int], completed: int, keep: bool, batches: Mapping[int, int],
        sent: Mapping[int, Content | None],
    ) -> tuple[Parcel, Any]:  # fmt: skip
        """Train clients; return the answer, and their states if they are to be kept.

        Args:
            replies: distinct replies.
            which: by client id which of the replies it is.
            completed: number of rounds before this one.
            keep: whether states are returned.
            batches: by client id how many batches it trains at most.
            sent: states of those clients that are not in memory, see :meth:`lacks`.

        Returns:
            The answer. Then the states of all who have trained: a parcel, or by client what goes into its file where
            not all clients are in memory.
        """
        self.carried.sent, self.carried.changed, self._kept = sent, {}, None
        answer = self._train(replies, which, completed, batches, keep and self.awake is None)
        return answer, self._kept if self.awake is None else self.carried.changed

    @carefully
    def _train(
        self, replies: Parcel, which: Mapping[int, int], completed: int, batches: Mapping[int, int], keep: bool
    ) -> Answer:
        distinct: list[Payload] = unpacked(replies)
        trained: dict[int, Trained] = {}
        seconds: dict[int, float] = {}
        with torch.autocast(self.device, enabled=False, cache_enabled=False):
            for client in self._in_turn(which):
                began = time.perf_counter()
                trained |= self.engine.train({client: distinct[which[client]]}, completed, batches)
                seconds[client] = time.perf_counter() - began
        if self.engine.asleep is not None:
            self.engine.asleep.write()
        if keep:
            self._kept = packed(self.engine.states(which))
        return Answer(trained, seconds, self.engine.left.intersection(which))

    @carefully
    def ask(
        self, question: Parcel, replies: Parcel, which: Mapping[int, int | None], modes: Modes,
        sent: Mapping[int, Content | None],
    ) -> dict[int, Any]:  # fmt: skip
        """Ask clients; see :meth:`~lit_pfl.engines.Engine.ask`."""
        self.carried.sent = sent
        asked: Callable[[Client], Any] = unpacked(question)
        distinct = unpacked(replies)
        shown = {client: None if (n := which[client]) is None else distinct[n] for client in self._in_turn(which)}
        with modes.active(self.device):
            return self.engine.ask(asked, shown)

    @carefully
    def states(self) -> dict[str, Any]:
        """Return the states of all clients."""
        return self.engine.states(self.engine.clients)

    @carefully
    def load(self, state: Parcel) -> None:
        """Take over a state of all clients that live here."""
        self.engine.load_state_dict(unpacked(state))

    @carefully
    def renew(self, seed: int) -> None:
        """Let all clients go, since their states have become others elsewhere."""
        self.engine.abort()
        self.engine, self.work.seed = Local(self.awake), seed
        self.engine.setup(self.work, [], self.carried)

    @carefully
    def stop(self) -> None:
        """End all fits in good order."""
        self.engine.stop()
