"""Bringing tensors from every process to every other, across machines and within them."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_pfl.engines.processes import Processes
from lit_pfl.engines.shared_memory import Home, Shape, SharedMemory, seen_at, side_by_side, size_of_all

Tell = Callable[[Any], list[Any]]


class Place(NamedTuple):
    """What a tensor that is brought is like, and where it is.

    Args:
        shape: how it lies in memory.
        home: at which byte of its process's :class:`~lit_pfl.engines.shared_memory.Home` it lives, if it does.
    """

    shape: Shape
    home: int | None


class Carrier:
    """Tensors lie where all processes of a machine see them. Of every machine one process, its first, tells those of
    other machines, and puts what it hears where its neighbours see it.

    Args:
        processes: the processes of the run.
        tell: tells all of them something, and returns what they tell, by rank.

    Attributes:
        neighbours: the processes whose memory this one sees, itself among them.
    """

    def __init__(self, processes: Processes, tell: Tell) -> None:
        self.rank, self.tell = processes.rank, tell
        self._own = {kept: _some_memory() for kept in (False, True)}
        self._heard = {kept: _some_memory() for kept in (False, True)}  # from other machines
        self._seen: dict[str, Tensor] = {}  # memory of neighbours
        self._home: Home | None = None
        self._homes: dict[int, Tensor] = {}  # memory of neighbours in which their tensors live
        self._found: dict[tuple[int, Place], Tensor] = {}  # tensors that live there
        self.neighbours = self._look_around()
        self._leaders = tell(self.neighbours[0])
        leaders = sorted(set(self._leaders))
        self._machines = {leader: machine for machine, leader in enumerate(leaders)}
        self._between = processes.among(leaders) if len(leaders) > 1 and self.rank in leaders else None

    def _look_around(self) -> list[int]:
        token = secrets.token_bytes(16)
        memory = self._own[False]
        memory.sized(len(token)).copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        there = self.tell((memory.path, token.hex()))
        sees = [rank for rank, (path, token) in enumerate(there) if _reads(path, bytes.fromhex(token))]
        others_see = self.tell(sees)
        return [rank for rank in sees if self.rank in others_see[rank]] or [self.rank]

    def settle(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the same values in memory that all processes see; what lives there is brought without being copied.

        All processes call this. Where not all of them are on one machine, tensors are returned as they are.
        """
        if len(self.neighbours) < len(self._leaders):
            return list(tensors)
        home = Home(tensors)
        there = self.tell((home.path, home.nbytes))
        self._found.clear()
        self._homes = {rank: seen_at(*found) for rank, found in enumerate(there) if rank != self.rank and found[1]}
        self._home = home
        self.tell(None)  # all have it in hand
        return home.tensors

    def place(self, tensor: Tensor) -> Place:
        """Say what a tensor of this process is like, and where it is."""
        home = self._home.place(tensor) if self._home else None
        return Place(Shape.of(tensor), None) if home is None else Place(home[1], home[0])

    def bring(
        self, tensors: list[Tensor], places: list[list[Place]], only_to: int | None, kept: bool
    ) -> list[list[Tensor]]:
        """Return the tensors of every process, by rank; nothing for this one, and nothing where they are not wanted.

        All processes have heard what comes, so nobody looks any more at what was there before.

        Args:
            tensors: those of this process.
            places: of the tensors of every process.
            only_to: who alone gets them.
            kept: which of two places they are put to.
        """
        moved = self._move(
            [tensor for tensor, place in zip(tensors, places[self.rank], strict=True) if place.home is None],
            [[place.shape for place in there if place.home is None] for there in places],
            only_to,
            kept,
        )
        if only_to not in (None, self.rank):
            return [[] for _ in places]
        return [
            [] if rank == self.rank else self._put_together(rank, there, moved[rank])
            for rank, there in enumerate(places)
        ]

    def _put_together(self, rank: int, places: list[Place], moved: list[Tensor]) -> list[Tensor]:
        arrived = iter(moved)
        return [next(arrived) if place.home is None else self._at_home(rank, place) for place in places]

    def _at_home(self, rank: int, place: Place) -> Tensor:
        if (rank, place) not in self._found:
            assert place.home is not None
            self._found[rank, place] = place.shape.on(self._homes[rank][place.home : place.home + place.shape.nbytes])
        return self._found[rank, place]

    def _move(
        self, tensors: list[Tensor], shapes: list[list[Shape]], only_to: int | None, kept: bool
    ) -> list[list[Tensor]]:
        if not any(shapes):
            return [[] for _ in shapes]
        memory = self._own[kept]
        own = memory.sized(size_of_all(shapes[self.rank]))
        for place, tensor in zip(side_by_side(shapes[self.rank], own), tensors, strict=True):
            place.copy_(tensor)
        paths = self.tell(memory.path)
        sizes = [size_of_all(there) for there in shapes]
        places = {rank: self._look(paths[rank], sizes[rank]) for rank in self.neighbours if rank != self.rank}
        if len(self._machines) > 1:
            places |= self._from_other_machines(places | {self.rank: own[: sizes[self.rank]]}, sizes, only_to, kept)
        if only_to not in (None, self.rank):
            return [[] for _ in shapes]
        return [side_by_side(there, places[rank]) if rank in places else [] for rank, there in enumerate(shapes)]

    def _from_other_machines(
        self, here: dict[int, Tensor], sizes: list[int], only_to: int | None, kept: bool
    ) -> dict[int, Tensor]:
        leader = self._leaders[self.rank]
        wanted = only_to is None or self._leaders[only_to] == leader
        starts, end = {}, 0
        for rank, size in enumerate(sizes):
            if wanted and self._leaders[rank] != leader:
                starts[rank], end = end, end + size
        memory = self._heard[kept]
        heard = memory.sized(end) if self._between is not None else None
        if heard is not None:
            for rank, size in enumerate(sizes):
                if size:
                    start = starts.get(rank, 0)
                    self._carry(rank, here.get(rank, heard[start : start + size]), only_to)
        path = self.tell(memory.path)[leader]
        if heard is None:
            heard = self._look(path, end)
        return {rank: heard[start : start + sizes[rank]] for rank, start in starts.items()}

    def _carry(self, rank: int, place: Tensor, only_to: int | None) -> None:
        """Take one process's tensors from its machine to all others, or to one."""
        assert self._between is not None
        source = self._machines[self._leaders[rank]]
        if only_to is None:
            self._between.broadcast(place, source)
            return
        target = self._machines[self._leaders[only_to]]
        if source == target or self._between.rank not in (source, target):
            return
        if self._between.rank == source:
            self._between.send(place.numpy().tobytes(), target)
        else:
            place.copy_(torch.frombuffer(bytearray(self._between.receive(source)), dtype=torch.uint8))

    def _look(self, path: str, nbytes: int) -> Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if path not in self._seen or len(self._seen[path]) < nbytes:
            self._seen[path] = seen_at(path, nbytes)
        return self._seen[path][:nbytes]

    def one_copy(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return equal tensors, in memory that the processes of this machine share."""
        leader = self.neighbours[0]
        shapes = [Shape.of(tensor) for tensor in tensors]
        nbytes, memory = size_of_all(shapes), None
        if leader == self.rank and len(self.neighbours) > 1:
            memory = SharedMemory()
            for place, tensor in zip(side_by_side(shapes, memory.sized(nbytes)), tensors, strict=True):
                place.copy_(tensor)
        path, there = self.tell((memory.path if memory else "", nbytes))[leader]
        shared = side_by_side(shapes, self._look(path, nbytes)) if path and there == nbytes else tensors
        self._seen.pop(path, None)
        self.tell(None)  # all have it in hand: it is gone when they let it go
        return shared


class _OwnMemory:
    """Memory that nobody else sees."""

    path = ""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sized(self, nbytes: int) -> Tensor:
        """Return it as an (n,) uint8 tensor with at least so many bytes."""
        if nbytes > len(self._memory):
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory


def _some_memory() -> SharedMemory | _OwnMemory:
    try:
        return SharedMemory()
    except OSError:
        return _OwnMemory()


def _reads(path: str, token: bytes) -> bool:
    """Say whether a file begins with a token."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path of Linux's
            return file.read(len(token)) == token
    except OSError:
        return False
