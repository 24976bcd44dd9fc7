"""What travels between client and server, and exactly how many bytes it is.

A payload is encoded in the safetensors lay-out: 8 bytes of header length, a JSON header, and the tensors' own bytes. No
pickle ever crosses a link. A tensor that is marked as sparse travels as a bit mask and its non-zero values whenever
that is smaller, one that is given in factors as these factors.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lit_pfl.finite import all_finite
from lit_pfl.low_rank import LowRank

#: what names of tensors end in that hold packed bits, which say something of numbers but are none themselves
BITS = "#bits"
_MASK, _VALUES = "#mask", "#values"
_LEFT, _RIGHT = "#left", "#right"
_SPARSE, _LOW_RANK = "sparse", "low_rank"
Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
Shapes = dict[str, dict[str, tuple[int, ...]]]
#: in the order in which safetensors lays types out
_DTYPES = {
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
_ORDER = list(_DTYPES)
#: the types of tensors that a payload holds
TYPES = _DTYPES.keys()


class Payload(Mapping[str, Tensor]):
    """Named tensors on their way: a read-only mapping that knows its encoded size.

    The tensors are held by reference; nothing is copied until :meth:`to_bytes`.

    Args:
        tensors: the tensors by name.
        sparse: names whose zeros need not travel (a sparse ``mu``, a masked weight); they arrive as +0.
        low_rank: further tensors by name, in factors. They are read as what the factors make.

    Attributes:
        sparse: the names given as sparse.
        low_rank: the tensors given in factors.

    Raises:
        ValueError: for a name that is given twice, or that the encoding of another tensor needs.

    Example:
        >>> payload = Payload({"u": torch.ones(3), "mu": torch.tensor([0., 0., 0., 5.] * 100)}, sparse=["mu"])
        >>> payload.elements
        103
        >>> payload.nbytes == len(payload.to_bytes())
        True
        >>> Payload.from_bytes(payload.to_bytes())["mu"][:4]
        tensor([0., 0., 0., 5.])
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        sparse: Iterable[str] = (),
        low_rank: Mapping[str, LowRank] = MappingProxyType({}),
    ) -> None:
        self.sparse = frozenset(sparse)
        self.low_rank = dict(low_rank)
        for name in self.low_rank:
            if name in tensors:
                raise ValueError(f"Tensor {name!r} is given twice, as it is and in factors.")
        self._tensors = {**tensors, **{name: factors.dense() for name, factors in self.low_rank.items()}}
        for names, what, parts in (
            (self.sparse, "sparse", (_MASK, _VALUES)),
            (self.low_rank, "given in factors", (_LEFT, _RIGHT)),
        ):
            for name in names:
                if any(name + part in self._tensors for part in parts):
                    taken = " and ".join(repr(name + part) for part in parts)
                    raise ValueError(f"Tensor {name!r} is {what}, so {taken} are taken.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Payload({len(self)} tensors, {self.elements} elements, {self.nbytes} bytes)"

    def clone(self) -> "Payload":
        """Return a payload with copies of the tensors."""
        return self._changed(lambda tensor: tensor.detach().clone())

    def to(self, device: torch.device) -> "Payload":
        """Return a payload with the tensors on a device."""
        return self._changed(lambda tensor: tensor.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Payload":
        plain = {name: change(tensor) for name, tensor in self.items() if name not in self.low_rank}
        payload = Payload(plain, self.sparse, {name: factors.map(change) for name, factors in self.low_rank.items()})
        payload._tensors = {name: payload[name] for name in self}  # in the same order
        return payload

    def without(self, name: str) -> "Payload":
        """Return the same payload without one of its plain tensors."""
        return Payload(
            {k: v for k, v in self.items() if k != name and k not in self.low_rank}, self.sparse, self.low_rank
        )

    def laid_out(self, names: Iterable[str], sparse: Iterable[str]) -> "Payload":
        """Return the same tensors in another order, and with others known as sparse.

        The encoding keeps neither: it sorts by type and name, and a tensor that travelled dense is not known as sparse.

        Args:
            names: all names, in order.
            sparse: those of sparse tensors.

        Raises:
            ValueError: when these are not all names.
        """
        names = list(names)
        if sorted(names) != sorted(self):
            raise ValueError(f"The payload holds {sorted(self)}, not {sorted(names)}.")
        payload = Payload({}, sparse)
        payload.low_rank, payload._tensors = self.low_rank, {name: self[name] for name in names}
        return payload

    @cached_property
    def _nonzeros(self) -> dict[str, int]:
        return {name: int(torch.count_nonzero(self[name])) for name in self if name in self.sparse}

    @cached_property
    def not_finite(self) -> str | None:
        """Name of a tensor that holds NaN or infinity, as it is when this is first asked; None if none does."""
        if all_finite(self._tensors.values()):
            return None
        # sparse ones can only be asked by their sum
        suspects = (name for name, tensor in self.items() if not all_finite([tensor]))
        return next((name for name in suspects if not self[name].isfinite().all()), None)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of elements of every tensor as the papers count them: of a sparse one the non-zero ones.

        Of one in factors it is theirs, if they have fewer. Bits count as bytes only: those of a tensor whose name ends
        in ``#bits``, like those that say where a sparse tensor is not zero.
        """
        bits = {name: 0 for name in self if name.endswith(BITS)}
        in_factors = {name: factors.elements for name, factors in self.low_rank.items() if factors.saves}
        return {name: tensor.numel() for name, tensor in self.items()} | self._nonzeros | in_factors | bits

    @property
    def elements(self) -> int:
        """Number of elements of all tensors, see :attr:`counts`."""
        return sum(self.counts.values())

    def _travels_in_factors(self, name: str) -> bool:
        return name in self.low_rank and self.low_rank[name].saves

    def _travels_sparse(self, name: str) -> bool:
        if name not in self.sparse:
            return False
        tensor = self[name]
        saved = (tensor.numel() - self._nonzeros[name]) * tensor.element_size()
        return _mask_bytes(tensor.numel()) < saved

    @cached_property
    def _parts(self) -> dict[str, Layout]:
        """What travels of every tensor, by name: itself, its mask and values, or its factors."""
        parts: dict[str, Layout] = {}
        for name, tensor in self._tensors.items():
            if self._travels_in_factors(name):
                factors = self.low_rank[name]
                parts[name] = (
                    (name + _LEFT, tensor.dtype, tuple(factors.left.shape)),
                    (name + _RIGHT, tensor.dtype, tuple(factors.right.shape)),
                )
            elif self._travels_sparse(name):
                parts[name] = (
                    (name + _MASK, torch.uint8, (_mask_bytes(tensor.numel()),)),
                    (name + _VALUES, tensor.dtype, (self._nonzeros[name],)),
                )
            else:
                parts[name] = ((name, tensor.dtype, tuple(tensor.shape)),)
        return parts

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor in :meth:`to_bytes`; names, types and shapes come on top."""
        return {
            name: sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in parts)
            for name, parts in self._parts.items()
        }

    @cached_property
    def nbytes(self) -> int:
        """Exact length of :meth:`to_bytes`, without encoding; 0 when there is nothing to send."""
        if not self._tensors:
            return 0
        shapes: Shapes = {}
        for name, tensor in self._tensors.items():
            if self._travels_in_factors(name):
                shapes.setdefault(_LOW_RANK, {})[name] = tuple(tensor.shape)
            elif self._travels_sparse(name):
                shapes.setdefault(_SPARSE, {})[name] = tuple(tensor.shape)
        layout = tuple(part for parts in self._parts.values() for part in parts)
        return _encoded_size(layout, tuple(_metadata(shapes).items()))

    def to_bytes(self) -> bytes:
        """Encode."""
        if not self._tensors:
            return b""
        parts: dict[str, Tensor] = {}
        shapes: Shapes = {}
        for name, tensor in self._tensors.items():
            if self._travels_in_factors(name):
                parts[name + _LEFT] = _plain(self.low_rank[name].left)
                parts[name + _RIGHT] = _plain(self.low_rank[name].right)
                shapes.setdefault(_LOW_RANK, {})[name] = tuple(tensor.shape)
            elif self._travels_sparse(name):
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                mask = flat != 0
                parts[name + _MASK] = torch.from_numpy(np.packbits(mask.numpy()))
                parts[name + _VALUES] = flat[mask]
                shapes.setdefault(_SPARSE, {})[name] = tuple(tensor.shape)
            else:
                parts[name] = _plain(tensor)
        return safetensors.torch.save(parts, metadata=_metadata(shapes) or None)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Payload":
        """Decode what :meth:`to_bytes` made. Marked as sparse, and held in factors, are the tensors that travelled so.

        Raises:
            safetensors.SafetensorError: when ``data`` is not such an encoding.
        """
        if not data:
            return cls({})
        parts = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        shapes = {key: json.loads(text) for key, text in header.get("__metadata__", {}).items()}
        sparse: dict[str, list[int]] = shapes.get(_SPARSE, {})
        for name, shape in sparse.items():
            mask, values = parts.pop(name + _MASK), parts.pop(name + _VALUES)
            tensor = torch.zeros(shape, dtype=values.dtype)
            bits = np.unpackbits(mask.numpy(), count=tensor.numel()).astype(bool)
            tensor.view(-1)[torch.from_numpy(bits)] = values
            parts[name] = tensor
        low_rank = {
            name: LowRank(parts.pop(name + _LEFT), parts.pop(name + _RIGHT), tuple(shape))
            for name, shape in shapes.get(_LOW_RANK, {}).items()
        }
        return cls(parts, sparse, low_rank)


def as_payload(tensors: Mapping[str, Tensor]) -> Payload:
    """Return tensors as a payload, which they may be already."""
    return tensors if isinstance(tensors, Payload) else Payload(tensors)


def _plain(tensor: Tensor) -> Tensor:
    """Return a copy as safetensors wants them: sharing no memory, with plain strides even in dimensions of size 1."""
    tensor = tensor.detach().cpu()
    return tensor.new_empty(tensor.shape).copy_(tensor)


def _metadata(shapes: Shapes) -> dict[str, str]:
    return {key: json.dumps(by_name) for key, by_name in shapes.items()}


def _mask_bytes(numel: int) -> int:
    return (numel + 7) // 8


@lru_cache(maxsize=64)
def _encoded_size(layout: Layout, metadata: tuple[tuple[str, str], ...]) -> int:
    """Length of the encoding of tensors of these names, types and shapes; safetensors sorts by type, then name."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in sorted(layout, key=lambda part: (_ORDER.index(part[1]), part[0])):
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + (len(text) + 7) // 8 * 8 + end
