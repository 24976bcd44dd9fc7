"""Processes that tell each other things, over torch.distributed's gloo, and notice when one of them is gone."""

import atexit
import copy
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from lit_pfl.errors import RankError

#: bytes of a message that travel at once, its length among them; most have no more
HEAD = 4096
#: seconds between two looks at what one waits for: at first, and at most
NAPS = 2e-5, 2e-3
#: seconds for which a process that ends waits for what it has given up
GIVEN_UP = 5.0
#: seconds between the end of a process's connections and that of the process itself, at most
LAST_BREATH = 1.0


class Processes:
    """A group of processes, each of which makes one of these.

    It is a group of its own and not torch.distributed's default one: whoever finds that initialised takes the processes
    for copies that train one model. So torchmetrics would add up the scores of different clients, and Lightning would
    wait for all processes in the middle of a batch.

    Args:
        rank: this process's number, from 0.
        size: number of processes.
        address: where process 0 can be reached.
        port: likewise.
        timeout: seconds to wait for another process before giving up.
        check: called while this one waits; raises an error when there is no use in waiting.

    Raises:
        RankError: when the others do not come.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        port: int,
        timeout: float = 1800.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.timeout, self.check = rank, size, timeout, check
        limit = timedelta(seconds=timeout)
        meeting_place = _meeting_place(address, port, rank == 0, limit)
        number = meeting_place.add(f"groups of {rank}", 1)  # all processes make their groups in the same order
        self._store = PrefixStore(f"lit_pfl {number}", meeting_place)
        self._store.set(f"{rank} is here", "")
        everybody = [f"{other} is here" for other in range(size)]
        self._wait(lambda: self._store.check(everybody), timeout)
        self._gloo: Any = ProcessGroupGloo(self._store, rank, size, limit)

    def among(self, members: list[int]) -> "Processes":
        """Return a group of some of the processes, this one among them; each of them has to call this."""
        group = copy.copy(self)
        group.rank, group.size = members.index(self.rank), len(members)
        store = PrefixStore(f"among {members}", self._store)
        group._gloo = ProcessGroupGloo(store, group.rank, group.size, timedelta(seconds=self.timeout))
        return group

    def all_gather(self, message: bytes, timeout: float | None = None) -> list[bytes]:
        """Return what every process has to say, by rank.

        Args:
            message: what this one says.
            timeout: seconds to wait; by default the group's.

        Raises:
            RankError: when another process is gone, or does not answer in time.
        """
        heads = self._all_gather(len(message).to_bytes(8, "big") + message, HEAD, timeout)
        lengths = [int.from_bytes(head[:8], "big") for head in heads]
        messages = [head[8 : 8 + length] for head, length in zip(heads, lengths, strict=True)]
        if (longest := max(lengths) - (HEAD - 8)) > 0:
            rest = self._all_gather(message[HEAD - 8 :], longest, timeout)
            messages = [(head + more)[:length] for head, more, length in zip(messages, rest, lengths, strict=True)]
        return messages

    def _all_gather(self, message: bytes, length: int, timeout: float | None) -> list[bytes]:
        own = torch.frombuffer(bytearray(message[:length].ljust(length, b"\0")), dtype=torch.uint8)
        everybody = [torch.empty_like(own) for _ in range(self.size)]
        self._finish(self._gloo.allgather([everybody], [own]), timeout)
        return [tensor.numpy().tobytes() for tensor in everybody]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a (n,) tensor with what one of the processes has in it."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._finish(self._gloo.broadcast([tensor], options))

    def send(self, message: bytes, to: int) -> None:
        """Send a message to one process, which has to :meth:`receive` it."""
        length = torch.tensor([len(message)])
        self._finish(_InBackground(self._gloo.send([length], to, 0)))
        if message:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            self._finish(_InBackground(self._gloo.send([content], to, 0)))

    def receive(self, source: int) -> bytes:
        """Wait for a message from one process."""
        length = torch.zeros(1, dtype=torch.int64)
        self._finish(_InBackground(self._gloo.recv([length], source, 0)))
        if not length:
            return b""
        message = torch.empty(int(length), dtype=torch.uint8)
        self._finish(_InBackground(self._gloo.recv([message], source, 0)))
        return message.numpy().tobytes()

    def _finish(self, work: "Work | _InBackground", timeout: float | None = None) -> None:
        # Not work.wait() alone, in which no signal would be heard and nobody's end be noticed.
        try:
            self._wait(work.is_completed, timeout or self.timeout)
        except BaseException:
            atexit.register(_let_end, work)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            end = time.monotonic() + LAST_BREATH  # whoever is killed loses its connections before it counts as ended
            self._wait(lambda: time.monotonic() > end, math.inf)
            raise RankError("Another process of this run is gone; its own output says why.") from error

    def _wait(self, done: Callable[[], bool], timeout: float) -> None:
        end, (nap, longest) = time.monotonic() + timeout, NAPS
        while not done():
            self.check()
            if time.monotonic() > end:
                raise RankError(f"Another process of this run has not answered for {timeout:g} seconds.")
            time.sleep(nap)
            nap = min(longest, nap * 1.1)


class _InBackground:
    """A message to or from one process. Gloo says whether it has arrived only to those who do nothing but wait."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def _let_end(work: "Work | _InBackground") -> None:
    """Wait a little for what was given up: a thread that comes out of gloo when Python is about to end aborts it."""
    end = time.monotonic() + GIVEN_UP
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(NAPS[1])


@cache  # for as long as this process lives: another group may meet there later
def _meeting_place(address: str, port: int, serves: bool, timeout: timedelta) -> Store:
    """Return the store in which processes find each other: torchrun's where it has one, or that of process 0."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        address, port, is_master=serves and not by_torchrun, wait_for_workers=False, multi_tenant=True, timeout=timeout
    )
    if not by_torchrun:
        return store
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
