"""Processes that send each other bytes, over torch.distributed's gloo, and notice when one of them is gone."""

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

#: seconds between two looks at what one waits for
NAP = 1e-3
#: seconds for which a process that ends waits for a message that it has given up
GIVEN_UP = 5.0


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
        by_torchrun: whether torchrun may have started them, which then has a place to meet already.

    Raises:
        ConnectionError: when the others do not come.
    """

    def __init__(
        self, rank: int, size: int, address: str, port: int, timeout: float = 1800.0, by_torchrun: bool = False
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        limit = timedelta(seconds=timeout)
        try:
            meeting_place = _meeting_place(address, port, rank == 0, limit, by_torchrun)
            number = meeting_place.add(f"groups of {rank}", 1)  # all processes make their groups in the same order
            self._store = PrefixStore(f"lit_pfl {number}", meeting_place)
            self._store.set(f"{rank} is here", "")
            everybody = [f"{other} is here" for other in range(size)]
            self._wait(lambda: self._store.check(everybody), self._absent)
            self._gloo: Any = ProcessGroupGloo(self._store, rank, size, limit)
        except RuntimeError as error:  # of PyTorch, as where process 0 is not there, or has given up
            words = str(error).partition("\n")[0]
            problem = "Rank 0 cannot listen at" if rank == 0 else "Rank 0 of this run cannot be reached at"
            raise ConnectionError(f"{problem} {address}:{port}: {words}") from error

    def _absent(self) -> str:
        absent = [str(other) for other in range(self.size) if not self._store.check([f"{other} is here"])]
        return f"Of the {self.size} processes of this run, rank {', '.join(absent)} has not come"

    def send(self, message: bytes, to: int) -> None:
        """Send a message to one process, which has to :meth:`receive` it."""
        self._move(self._gloo.send, torch.tensor([len(message)]), to)
        if message:
            self._move(self._gloo.send, torch.frombuffer(bytearray(message), dtype=torch.uint8), to)

    def receive(self, source: int) -> bytes:
        """Wait for a message from one process."""
        length = torch.zeros(1, dtype=torch.int64)
        self._move(self._gloo.recv, length, source)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            self._move(self._gloo.recv, message, source)
        return message.numpy().tobytes()

    def _move(self, move: Any, tensor: Tensor, other: int) -> None:
        # In a thread: while it waits itself, a process neither hears a signal nor knows of a time limit.
        failed: list[RuntimeError] = []

        def wait() -> None:
            try:
                move([tensor], other, 0).wait()
            except RuntimeError as error:
                failed.append(error)

        thread = Thread(target=wait, daemon=True)
        thread.start()
        try:
            self._wait(lambda: not thread.is_alive(), lambda: f"Rank {other} of this run has not answered")
        except BaseException:
            atexit.register(thread.join, GIVEN_UP)  # one that comes out of gloo when Python is about to end aborts it
            raise
        if failed:
            raise ConnectionError(
                f"Rank {other} of this run has ended. Its output says why, unless its fit was shorter than the others'."
            ) from failed[0]

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        end = time.monotonic() + self.timeout
        while not done():
            if time.monotonic() > end:
                raise ConnectionError(f"{what()} for {self.timeout:g} seconds.")
            time.sleep(NAP)


@cache  # for as long as this process lives: another group may meet there later
def _meeting_place(address: str, port: int, serves: bool, timeout: timedelta, by_torchrun: bool) -> Store:
    """Return the store in which processes find each other: torchrun's where it has one, or that of process 0."""
    has_store = by_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        address, port, is_master=serves and not has_store, wait_for_workers=False, multi_tenant=True, timeout=timeout
    )
    if not has_store:
        return store
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
