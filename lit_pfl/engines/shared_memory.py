"""Memory that several processes of one machine see, so that tensors need not travel among them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
        return cls(tensor.dtype, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """Return a tensor of this shape on (nbytes,) uint8 memory."""
        start = memory.storage_offset() // self.dtype.itemsize
        return memory.view(self.dtype).as_strided(self.shape, self.stride, start)


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

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def seen_at(path: str, nbytes: int) -> Tensor:
    """Return the first bytes of some process's shared memory, as an (nbytes,) uint8 tensor.

    Raises:
        RuntimeError: when it cannot be seen from here.
    """
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
