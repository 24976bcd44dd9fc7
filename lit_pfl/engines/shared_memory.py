"""Memory that several processes of one machine see, so that tensors need not travel among them."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

#: where in memory a tensor may begin: at a multiple of so many bytes, as PyTorch's own do
ALIGNMENT = 64


@dataclass(frozen=True)
class Shape:
    """How a tensor lies in memory.

    Args:
        dtype: its type.
        shape: its shape.
        stride: its strides; all of its memory is in use.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """Return how a copy of a tensor lies: as the tensor itself, where that leaves no gaps."""
        return cls(tensor.dtype, tuple(tensor.shape), _dense(tensor.shape, tensor.stride()))

    def is_that_of(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in just this way."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape and tensor.stride() == self.stride

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """Return a tensor of this shape on (nbytes,) uint8 memory."""
        start = memory.storage_offset() // self.dtype.itemsize
        return memory.view(self.dtype).as_strided(self.shape, self.stride, start)


@lru_cache(4096)  # a federation has few kinds of tensors, and asks for every one of them every round
def _dense(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


def side_by_side(shapes: Sequence[Shape], memory: Tensor) -> list[Tensor]:
    """Return tensors that lie one after another on (n,) uint8 memory of :func:`size_of_all` bytes or more."""
    tensors, start = [], 0
    for shape in shapes:
        tensors.append(shape.on(memory[start : start + shape.nbytes]))
        start += _padded(shape.nbytes)
    return tensors


def size_of_all(shapes: Sequence[Shape]) -> int:
    """Return how many bytes tensors take side by side."""
    return sum(_padded(shape.nbytes) for shape in shapes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """Memory of this process that others of the same machine and user can see. It has no name in any file system, and
    is gone when nobody sees it any more, however processes end.

    Raises:
        OSError: where the system has no such thing; Linux has.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("This system has no anonymous files.")
        self._file = os.memfd_create("lit-pfl")
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Where others of the machine find it, see :func:`seen_at`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def sized(self, nbytes: int) -> Tensor:
        """Return it as an (n,) uint8 tensor with at least so many bytes. It never shrinks: others may look at it."""
        if nbytes > len(self._memory):
            os.ftruncate(self._file, nbytes)
            self._memory = seen_at(self.path, nbytes)
        return self._memory

    def mapped(self, nbytes: int) -> mmap.mmap:
        """Return so many bytes of it, as Python's own."""
        os.ftruncate(self._file, nbytes)
        return mmap.mmap(self._file, nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class Home:
    """Shared memory in which tensors of this process live, each in a place of its own.

    Every one is all of its storage: whoever saves one saves no more than that.

    Args:
        tensors: those that are to move there.

    Attributes:
        tensors: the same values, in shared memory.
        nbytes: size of all of it.

    Raises:
        OSError: where the system has no shared memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        shapes = [Shape.of(tensor) for tensor in tensors]
        self._memory, self.nbytes = SharedMemory(), size_of_all(shapes)
        self.tensors = list(tensors)
        self._places: dict[int, tuple[int, Shape]] = {}
        if self.nbytes == 0:
            return
        memory, start = self._memory.mapped(self.nbytes), 0
        for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
            if shape.nbytes:
                flat = torch.frombuffer(memory, dtype=shape.dtype, count=prod(shape.shape), offset=start)
                self.tensors[number] = flat.as_strided(shape.shape, shape.stride).copy_(tensor.detach())
                self._places[flat.data_ptr()] = start, shape
            start += _padded(shape.nbytes)

    @property
    def path(self) -> str:
        """Where others of the machine find it, see :func:`seen_at`."""
        return self._memory.path

    def place(self, tensor: Tensor) -> tuple[int, Shape] | None:
        """Return at which byte a tensor lives here and how it lies, or None if it is none of those that do."""
        found = self._places.get(tensor.data_ptr())
        return found if found and found[1].is_that_of(tensor) else None


def seen_at(path: str, nbytes: int) -> Tensor:
    """Return the first bytes of some process's shared memory, as an (nbytes,) uint8 tensor.

    Raises:
        RuntimeError: when it cannot be seen from here.
    """
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
