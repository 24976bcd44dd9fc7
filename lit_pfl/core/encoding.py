"""How a payload's tensors are encoded: as they are, as a bit mask and values, or in factors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_pfl.errors import PayloadError
from lit_pfl.ops.low_rank import LowRank, matrix_shape

Shape = tuple[int, ...]
#: shape and type of tensors, by name
Layout = Mapping[str, tuple[Shape, torch.dtype]]
Parts = dict[str, tuple[Shape, torch.dtype]]
#: in the order in which safetensors lays types out
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Dense:
    """A tensor is sent as it is."""

    shape: Shape
    dtype: torch.dtype

    def parts(self, name: str) -> Parts:
        """Return shapes and types of what is sent, by name."""
        return {name: (self.shape, self.dtype)}

    def check(self, name: str) -> None:
        """Refuse what no sender encodes so."""

    @staticmethod
    def encode(tensor: Tensor) -> list[Tensor]:
        """Return what is sent, in the order of :meth:`parts`."""
        return [tensor]

    def decode(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor that its parts make."""
        return tensor


@dataclass(frozen=True, slots=True)
class Sparse:
    """A tensor is sent as a bit mask, and its values wherever one of their own bits is set."""

    shape: Shape
    dtype: torch.dtype
    stored: int

    @classmethod
    def of(cls, name: str, shape: Shape, parts: Parts) -> "Sparse":
        """Take a tensor's parts out of those of a payload."""
        mask, values = sparse_parts(name)
        del parts[mask]
        (stored,), dtype = parts.pop(values)
        return cls(shape, dtype, stored)

    @property
    def _numel(self) -> int:
        return math.prod(self.shape)

    @property
    def saves(self) -> bool:
        """Whether this is smaller than the tensor itself."""
        return _mask_bytes(self._numel) < (self._numel - self.stored) * self.dtype.itemsize

    def parts(self, name: str) -> Parts:
        """Return shapes and types of what is sent, by name."""
        mask, values = sparse_parts(name)
        return {mask: ((_mask_bytes(self._numel),), torch.uint8), values: ((self.stored,), self.dtype)}

    def check(self, name: str) -> None:
        """Refuse what no sender encodes so."""
        if not self.saves:
            raise PayloadError(f"tensor {name!r} is sparse although that saves nothing.", name)

    @staticmethod
    def encode(tensor: Tensor) -> list[Tensor]:
        """Return what is sent, in the order of :meth:`parts`."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        mask = bits(flat) != 0
        return [torch.from_numpy(np.packbits(mask.numpy())), flat[mask]]

    def decode(self, name: str, mask: Tensor, values: Tensor) -> Tensor:
        """Return the tensor that its parts make."""
        places = np.unpackbits(mask.numpy()).view(bool)
        if np.count_nonzero(places) != self.stored or places[self._numel :].any() or stored(values) != self.stored:
            raise PayloadError(f"tensor {name!r} has a mask that does not fit its values.", name)
        zeros = torch.zeros(self._numel, dtype=self.dtype)
        return zeros.masked_scatter_(torch.from_numpy(places[: self._numel]), values).view(self.shape)


@dataclass(frozen=True, slots=True)
class Factors:
    """A tensor is sent as two factors."""

    shape: Shape
    dtype: torch.dtype
    rank: int

    @classmethod
    def of(cls, name: str, shape: Shape, parts: Parts) -> "Factors":
        """Take a tensor's parts out of those of a payload."""
        left, right = factor_parts(name)
        del parts[left]
        (rank, _), dtype = parts.pop(right)
        return cls(shape, dtype, rank)

    def parts(self, name: str) -> Parts:
        """Return shapes and types of what is sent, by name."""
        left, right = factor_parts(name)
        rows, columns = matrix_shape(self.shape)
        return {left: ((rows, self.rank), self.dtype), right: ((self.rank, columns), self.dtype)}

    def check(self, name: str) -> None:
        """Refuse what no sender encodes so."""
        if not self.dtype.is_floating_point:
            raise PayloadError(f"tensor {name!r} is in factors of {self.dtype}, which are no real numbers.", name)
        if sum(matrix_shape(self.shape)) * self.rank >= math.prod(self.shape):
            raise PayloadError(f"tensor {name!r} is in factors although that saves nothing.", name)

    @staticmethod
    def encode(factors: LowRank) -> list[Tensor]:
        """Return what is sent, in the order of :meth:`parts`."""
        return [factors.left, factors.right]

    def decode(self, name: str, left: Tensor, right: Tensor) -> LowRank:
        """Return the tensor that its parts make, still in factors."""
        return LowRank(left, right, self.shape)


Encoding = Dense | Sparse | Factors


def sparse_parts(name: str) -> tuple[str, str]:
    """Return the names under which a sparse tensor is sent."""
    return f"{name}#mask", f"{name}#values"


def factor_parts(name: str) -> tuple[str, str]:
    """Return the names under which a tensor in factors is sent."""
    return f"{name}#left", f"{name}#right"


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in the same memory."""
    # a complex tensor is none of a payload's
    return tensor.detach().view(_INTEGERS[tensor.dtype.itemsize]) if tensor.dtype in DTYPES else tensor.detach()


def stored(tensor: Tensor) -> int:
    """Count the entries that are not all zero bits: -0.0 is one of them."""
    return int(torch.count_nonzero(bits(tensor)))


def nonzeros(tensor: Tensor) -> int:
    """Count the entries that are not zero: -0.0 is none of them."""
    if tensor.is_floating_point() and tensor.numel():
        integers = bits(tensor)
        if int(integers.min()) == torch.iinfo(integers.dtype).min:  # the bits of -0.0
            return int(torch.count_nonzero(tensor.detach()))
    return stored(tensor)  # many times as fast


def tensor_of(memory: memoryview, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the tensor that has these bytes, in memory of its own."""
    if not memory:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(memory), dtype=dtype)
    if dtype == torch.bool and bits(tensor).max() > 1:
        raise PayloadError(f"tensor {name!r} holds a bool that is neither 0 nor 1.", name)
    return tensor.view(shape)


class Expected(dict[str, tuple[Shape, torch.dtype]]):
    """The layout that an upload must have.

    Args:
        needed: what must be there.
        optional: what else may be there: weights that a client may have unfrozen.
    """

    def __init__(self, needed: Layout, optional: Layout) -> None:
        super().__init__(needed)
        self.optional = optional


def misfit(found: Layout, expected: Layout) -> tuple[str, str] | None:
    """Say what is wrong with an upload whose tensors are not those expected, and with which; None if they are."""
    known = {**expected.optional, **expected} if isinstance(expected, Expected) else expected
    for name in expected:
        if name not in found:
            return f"the upload lacks tensor {name!r}.", name
    for name, (shape, dtype) in found.items():
        if name not in known:
            return f"nobody asked for tensor {name!r}: an upload holds what the client joined with.", name
        if (shape, dtype) != known[name]:
            right_shape, right_dtype = known[name]
            right = f"{right_dtype} {tuple(right_shape)}"
            if shape != right_shape:
                right += (
                    " (keep one whose shape changes in training local, by the method's local=..., or without a method "
                    "by FederatedLoop(share=...))"
                )
            return f"tensor {name!r} is {dtype} {tuple(shape)}; it must be {right}.", name
    return None


def _mask_bytes(numel: int) -> int:
    return (numel + 7) // 8
