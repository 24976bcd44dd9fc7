"""What travels between client and server, and exactly how many bytes it is.

A payload is encoded in the safetensors lay-out: 8 bytes of header length, a JSON header, and the tensors' own bytes. No
pickle ever crosses a link. A tensor that is marked as sparse travels as a bit mask and its non-zero values whenever
that is smaller.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

_MASK, _VALUES = "#mask", "#values"
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


class Payload(Mapping[str, Tensor]):
    """Named tensors on their way: a read-only mapping that knows its encoded size.

    The tensors are held by reference; nothing is copied until :meth:`to_bytes`.

    Args:
        tensors: the tensors by name.
        sparse: names whose zeros need not travel (a sparse ``mu``, a masked weight); they arrive as +0.

    Attributes:
        sparse: the names given as sparse.

    Example:
        >>> payload = Payload({"u": torch.ones(3), "mu": torch.tensor([0., 0., 0., 5.] * 100)}, sparse=["mu"])
        >>> payload.elements
        103
        >>> payload.nbytes == len(payload.to_bytes())
        True
        >>> Payload.from_bytes(payload.to_bytes())["mu"][:4]
        tensor([0., 0., 0., 5.])
    """

    def __init__(self, tensors: Mapping[str, Tensor], sparse: Iterable[str] = ()) -> None:
        self._tensors = dict(tensors)
        self.sparse = frozenset(sparse)
        for name in self.sparse:
            if name + _MASK in self._tensors or name + _VALUES in self._tensors:
                raise ValueError(f"Tensor {name!r} is sparse, so {name + _MASK!r} and {name + _VALUES!r} are taken.")

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
        return Payload({name: tensor.detach().clone() for name, tensor in self.items()}, self.sparse)

    @cached_property
    def _nonzeros(self) -> dict[str, int]:
        return {name: int(torch.count_nonzero(self[name])) for name in self if name in self.sparse}

    @cached_property
    def elements(self) -> int:
        """Number of elements as the papers count them: of a sparse tensor, the non-zero ones only."""
        return sum(self._nonzeros.get(name, tensor.numel()) for name, tensor in self.items())

    def _travels_sparse(self, name: str) -> bool:
        if name not in self.sparse:
            return False
        tensor = self[name]
        saved = (tensor.numel() - self._nonzeros[name]) * tensor.element_size()
        return _mask_bytes(tensor.numel()) < saved

    @cached_property
    def nbytes(self) -> int:
        """Exact length of :meth:`to_bytes`, without encoding; 0 when there is nothing to send."""
        if not self._tensors:
            return 0
        layout: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for name, tensor in self._tensors.items():
            if self._travels_sparse(name):
                layout.append((name + _MASK, torch.uint8, (_mask_bytes(tensor.numel()),)))
                layout.append((name + _VALUES, tensor.dtype, (self._nonzeros[name],)))
                shapes.append((name, tuple(tensor.shape)))
            else:
                layout.append((name, tensor.dtype, tuple(tensor.shape)))
        return _encoded_size(tuple(layout), tuple(shapes))

    def to_bytes(self) -> bytes:
        """Encode."""
        if not self._tensors:
            return b""
        parts: dict[str, Tensor] = {}
        shapes: dict[str, list[int]] = {}
        for name, tensor in self._tensors.items():
            tensor = tensor.detach().cpu().contiguous()
            if self._travels_sparse(name):
                flat = tensor.reshape(-1)
                mask = flat != 0
                parts[name + _MASK] = torch.from_numpy(np.packbits(mask.numpy()))
                parts[name + _VALUES] = flat[mask]
                shapes[name] = list(tensor.shape)
            else:
                # safetensors wants tensors that share no memory, with plain strides even in dimensions of size 1
                parts[name] = tensor.new_empty(tensor.shape).copy_(tensor)
        return safetensors.torch.save(parts, metadata={"sparse": json.dumps(shapes)} if shapes else None)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Payload":
        """Decode what :meth:`to_bytes` made. Marked as sparse are the tensors that travelled so.

        Raises:
            safetensors.SafetensorError: when ``data`` is not such an encoding.
        """
        if not data:
            return cls({})
        parts = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        shapes: dict[str, list[int]] = json.loads(header.get("__metadata__", {}).get("sparse", "{}"))
        for name, shape in shapes.items():
            mask, values = parts.pop(name + _MASK), parts.pop(name + _VALUES)
            tensor = torch.zeros(shape, dtype=values.dtype)
            bits = np.unpackbits(mask.numpy(), count=tensor.numel()).astype(bool)
            tensor.view(-1)[torch.from_numpy(bits)] = values
            parts[name] = tensor
        return cls(parts, sparse=shapes)


def _mask_bytes(numel: int) -> int:
    return (numel + 7) // 8


@lru_cache(maxsize=64)
def _encoded_size(
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> int:
    """Length of the encoding of tensors of these names, types and shapes; safetensors sorts by type, then name."""
    header: dict[str, object] = {}
    if shapes:
        header["__metadata__"] = {"sparse": json.dumps({name: list(shape) for name, shape in shapes})}
    end = 0
    for name, dtype, shape in sorted(layout, key=lambda part: (_ORDER.index(part[1]), part[0])):
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + (len(text) + 7) // 8 * 8 + end
