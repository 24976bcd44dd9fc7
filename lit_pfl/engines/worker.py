"""Some of a federation's clients, in a process that another one commands."""

import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.engine import Trained
from lit_pfl.engines.local import Local
from lit_pfl.engines.parcels import Parcel, alike, packed, unpacked
from lit_pfl.engines.threads import keep_freed_memory
from lit_pfl.engines.work import Work
from lit_pfl.lightning_internals import undisturbed
from lit_pfl.randomness import random_state_kept


@dataclass(frozen=True)
class Outer:
    """What a worker knows of the federation's Trainer.

    Args:
        accelerator: where clients train.
        precision: in which they train.
        deterministic: whether PyTorch is to use deterministic algorithms only.
        rounds: number of rounds that are planned, or -1.
        seed: the federation's seed.
        threads: CPU threads that clients compute with.
        folder: the run's folder.
    """

    accelerator: str
    precision: Any
    deterministic: bool
    rounds: int
    seed: int
    threads: int
    folder: str

    def trainer(self) -> L.Trainer:
        """Return a Trainer like it."""
        quiet: dict[str, Any] = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "logger"), False)
        with undisturbed():
            return L.Trainer(
                accelerator=self.accelerator, devices=1, precision=self.precision, default_root_dir=self.folder,
                enable_model_summary=False, **quiet,
            )  # fmt: skip


class Modes(NamedTuple):
    """PyTorch's switches, as they are where a question is put.

    Args:
        grad: whether gradients are computed.
        autocast: the type that is cast to; None for none.
    """

    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> "Modes":
        """Return those of this process."""
        on = torch.is_autocast_enabled(device)
        return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(device) if on else None)

    @contextmanager
    def active(self, device: str) -> Iterator[None]:
        """Switch to them."""
        with torch.set_grad_enabled(self.grad), torch.autocast(device, self.autocast, self.autocast is not None):
            yield


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


class Failure(NamedTuple):
    """What went wrong in a worker, and where: an error that can be raised elsewhere."""

    error: Exception
    where: str


def carefully(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a worker's method return a packed answer, or the packed :class:`Failure` that came of it."""

    def call(self: "Worker", *args: Any) -> Parcel:
        try:
            return packed(method(self, *args))
        except Exception as error:
            try:
                pickle.dumps(error)
            except Exception:  # it holds something that does not travel
                found = RuntimeError(f"{type(error).__name__}: {error}")
                found.__notes__ = getattr(error, "__notes__", [])
                error = found
            return packed(Failure(error, f"process {os.getpid()} of {platform.node()}"))

    return call


class Worker:
    """Has clients in an engine :class:`~lit_pfl.engines.Local`. Arguments and answers are parcels.

    Args:
        path: where the commanding process finds its modules.
        job: prototype, data, what of the data is only read, local epochs and options of the clients' Trainers.
    """

    def __init__(self, path: Sequence[str], job: Parcel, samples: Parcel) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        keep_freed_memory()
        self.prototype, self.data, self.epochs, self.options = unpacked(job)
        vars(self.data).update(unpacked(samples, copy=False))
        self.engine = Local()

    def ready(self) -> tuple[str, str]:
        """Return the names of the machine and of its node of Ray, once the process is at work."""
        import ray

        return platform.node(), ray.get_runtime_context().get_node_id()

    @carefully
    def setup(self, outer: Outer) -> None:
        """Take note of the Trainer."""
        torch.set_num_threads(outer.threads)
        torch.use_deterministic_algorithms(outer.deterministic)
        trainer = outer.trainer()
        self.device = trainer.strategy.root_device.type
        if not hasattr(self, "work"):
            self.data.move_to(trainer.strategy.root_device)
            self.work = Work(
                self.prototype, self.data, outer.seed, self.epochs, self.options, trainer, outer.rounds, outer.threads
            )
        self.work.trainer, self.work.rounds = trainer, outer.rounds
        self.engine.setup(self.work, [])

    @carefully
    def joined(self) -> dict[int, ClientInfo]:
        """Return what clients send on joining."""
        infos = self.engine.joined()
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
        self.engine.make(come)
        with random_state_kept():
            for client in come:
                self.work.joined(self.engine.clients[client])  # which may give its tensors their shapes
        for number, state in enumerate(states):
            self.engine.take_up(unpacked(state), [client for client, place in come.items() if place == number])

    def train(
        self, replies: Parcel, which: Mapping[int, int], completed: int, keep: bool, batches: Mapping[int, int]
    ) -> tuple[Parcel, Parcel | None]:
        """Train clients; return the answer, and their states if they are to be kept.

        Args:
            replies: distinct replies.
            which: by client id which of the replies it is.
            completed: number of rounds before this one.
            keep: whether states are returned.
            batches: by client id how many batches it trains at most.
        """
        answer = self._train(replies, which, completed, batches)
        return answer, packed(self.engine.states(which)) if keep else None

    @carefully
    def _train(self, replies: Parcel, which: Mapping[int, int], completed: int, batches: Mapping[int, int]) -> Answer:
        distinct: list[Payload] = unpacked(replies)
        trained: dict[int, Trained] = {}
        seconds: dict[int, float] = {}
        with torch.autocast(self.device, enabled=False, cache_enabled=False):
            for client, place in which.items():
                began = time.perf_counter()
                trained |= self.engine.train({client: distinct[place]}, completed, batches)
                seconds[client] = time.perf_counter() - began
        return Answer(trained, seconds, self.engine.left.intersection(which))

    @carefully
    def ask(self, question: Parcel, replies: Parcel, which: Mapping[int, int | None], modes: Modes) -> dict[int, Any]:
        """Ask clients; see :meth:`~lit_pfl.engines.Engine.ask`."""
        asked: Callable[[Client], Any] = unpacked(question)
        distinct = unpacked(replies)
        shown = {client: None if place is None else distinct[place] for client, place in which.items()}
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
    def stop(self) -> None:
        """End all fits in good order."""
        self.engine.stop()
