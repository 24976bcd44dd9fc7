"""The processes that share a federation's clients: who has which, and how they tell each other things."""

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lit_pfl.engines.carrier import Carrier, Place
from lit_pfl.engines.processes import Processes
from lit_pfl.engines.shared_memory import Shape
from lit_pfl.errors import ConfigError, RankError

#: seconds that a process which cannot go on waits for the others to hear why
LAST_WORDS = 10.0


@dataclass(frozen=True)
class Told:
    """What a process told the others.

    Args:
        words: plain values, as JSON has them.
        tensors: tensors.
    """

    words: Any
    tensors: list[Tensor]


class Ranks:
    """The processes of a run, of which this is one. As it is, the only one.

    Attributes:
        rank: this process's number, from 0.
        size: number of processes.
    """

    rank, size = 0, 1

    def exchange(
        self, words: Any = None, tensors: Sequence[Tensor] = (), only_to: int | None = None, kept: bool = False
    ) -> list[Told]:
        """Tell all processes something, and hear what they tell, by rank. All of them have to call this.

        Args:
            words: plain values, as JSON has them.
            tensors: tensors on any device. Others get them on this process's own; what they get may be this process's
                own memory, or change with the next exchange of tensors.
            only_to: who alone gets tensors.
            kept: whether tensors stay as they are until the next exchange of such.

        Raises:
            RankError: when another process cannot go on.
        """
        return [Told(words, list(tensors))]

    def merged(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """Return plain values by client id, of the clients of all processes, in the order of ids."""
        return dict(sorted(pair for told in self.exchange(list(own.items())) for pair in told.words))

    def of_first(self, words: Any) -> Any:
        """Return what process 0 says."""
        return self.exchange(words)[0].words

    def states(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of all processes at process 0; elsewhere the own one. For checkpoints."""
        return [own]

    def one_copy(self, content: Any) -> Any:
        """Return the same nested tensors, in memory that all processes of a machine share."""
        return content

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """Let tensors of this process live where others can see them. All processes have to call this.

        They need not be copied any more when they are exchanged; so others see what becomes of them, until then.
        """

    def fail(self, reason: str) -> None:
        """Tell the others that this process cannot go on."""

    def dealt(self, sizes: Mapping[int, int]) -> list[int]:
        """Return the ids of the clients that this process has, in their order.

        The largest clients are dealt first, each to the process with the least to do.

        Args:
            sizes: number of samples of every client, by id.

        Raises:
            ConfigError: when there are more processes than clients.
        """
        if len(sizes) < self.size:
            raise ConfigError(f"trainer.devices: {self.size} processes are more than the {len(sizes)} clients.")
        load = [0] * self.size
        own = []
        for client in sorted(sizes, key=lambda client: (-sizes[client], client)):
            rank = load.index(min(load))
            load[rank] += sizes[client]
            if rank == self.rank:
                own.append(client)
        return sorted(own)


class ManyRanks(Ranks):
    """Several processes.

    Words travel through a :class:`~lit_pfl.engines.processes.Processes`, tensors by a
    :class:`~lit_pfl.engines.carrier.Carrier`; those of another device go through memory of the CPU.

    Args:
        processes: the group.
        device: where tensors are wanted that do not come from a CPU.
    """

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.rank, self.size = processes.rank, processes.size
        self.processes, self.device = processes, device
        self._gone = False
        self.carrier = Carrier(processes, lambda words: [told.words for told in self.exchange(words)])

    def exchange(  # noqa: D102
        self, words: Any = None, tensors: Sequence[Tensor] = (), only_to: int | None = None, kept: bool = False
    ) -> list[Told]:
        keys = [_identity(tensor) for tensor in tensors]
        distinct = dict(zip(keys, tensors, strict=True))
        places = {key: place for place, key in enumerate(distinct)}
        head: dict[str, Any] = {"words": words}
        if tensors:
            lie = [self.carrier.place(tensor) for tensor in distinct.values()]
            shapes = [place.shape for place in lie]
            kinds = {kind: number for number, kind in enumerate(dict.fromkeys(shapes))}
            head |= {
                "kinds": [(str(kind.dtype).removeprefix("torch."), kind.shape, kind.stride) for kind in kinds],
                "shapes": [kinds[shape] for shape in shapes],
                "homes": [place.home for place in lie],
                "elsewhere": [place for place, tensor in enumerate(distinct.values()) if tensor.device.type != "cpu"],
                "tensors": [places[key] for key in keys],
            }
        heads = self._heads(head)
        if not any("tensors" in head for head in heads):
            return [Told(head["words"], []) for head in heads]
        laid_out = [_places(head) for head in heads]
        moved = self.carrier.bring(list(distinct.values()), laid_out, only_to, kept)
        told = []
        for rank, (head, found) in enumerate(zip(heads, moved, strict=True)):
            if rank == self.rank:
                told.append(Told(head["words"], list(tensors)))
                continue
            elsewhere = set(head.get("elsewhere", ()))
            found = [tensor.to(self.device) if place in elsewhere else tensor for place, tensor in enumerate(found)]
            told.append(Told(head["words"], [found[place] for place in head.get("tensors", ())] if found else []))
        return told

    def _heads(self, head: Any, timeout: float | None = None) -> list[Any]:
        if self._gone:
            raise RankError("This run has ended; a process of it could not go on.")
        texts = self.processes.all_gather(json.dumps(head, default=str).encode(), timeout)
        heads = [json.loads(text) for text in texts]
        for rank, other in enumerate(heads):
            if "failed" in other and rank != self.rank:
                self._gone = True
                raise RankError(f"Rank {rank} could not go on ({other['failed']}).")
        return heads

    def states(self, own: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: D102
        file = io.BytesIO()
        if self.rank != 0:
            torch.save(own, file)
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8) if self.rank else torch.empty(0)
        told = self.exchange(tensors=[content], only_to=0)
        if self.rank != 0:
            return [own]
        # Read like the checkpoint that they become a part of, which may be no less plain.
        return [own] + [torch.load(io.BytesIO(part.tensors[0].numpy().data), "cpu") for part in told[1:]]

    def one_copy(self, content: Any) -> Any:  # noqa: D102
        found: list[Tensor] = []
        apply_to_collection(content, Tensor, found.append)
        tensors = list({id(tensor): tensor for tensor in found}.values())
        shared = self.carrier.one_copy(tensors)
        places = {id(tensor): place for tensor, place in zip(tensors, shared, strict=True)}
        return apply_to_collection(content, Tensor, lambda tensor: places[id(tensor)])

    def settle(self, tensors: Sequence[Tensor]) -> None:  # noqa: D102
        if self.device.type == "cpu":
            alone = _alone(tensors)
            for tensor, at_home in zip(alone, self.carrier.settle(alone), strict=True):
                tensor.data = at_home

    def fail(self, reason: str) -> None:  # noqa: D102
        if self._gone:
            return
        with suppress(RankError):  # who does not hear it will find this process gone
            self._heads({"failed": reason}, LAST_WORDS)
        self._gone = True


def _places(head: Mapping[str, Any]) -> list[Place]:
    kinds = [Shape(getattr(torch, name), tuple(shape), tuple(stride)) for name, shape, stride in head.get("kinds", ())]
    return [Place(kinds[kind], home) for kind, home in zip(head.get("shapes", ()), head.get("homes", ()), strict=True)]


def _alone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those tensors that share their memory with no other: only they can move to another place."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in distinct)

    def is_alone(storage: torch.UntypedStorage, tensor: Tensor) -> bool:
        return users[storage.data_ptr()] == 1 and storage.nbytes() == tensor.nbytes

    return [tensor for tensor in distinct if is_alone(tensor.untyped_storage(), tensor)]


def _identity(tensor: Tensor) -> Any:
    """Return what two names of one and the same tensor have in common."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
