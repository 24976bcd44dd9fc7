"""What is sent between client and server, and exactly how many bytes it is.

A payload is encoded in the safetensors layout: 8 bytes of header length, a JSON header, and the tensors' own bytes. No
pickle ever crosses a link. A tensor that is marked as sparse is sent as a bit mask and its non-zero values whenever
that is smaller, not counting the header, one that is given in factors as these factors.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from lit_pfl.core.encoding import (
    DTYPES,
    Dense,
    Encoding,
    Factors,
    Layout,
    Sparse,
    factor_parts,
    misfit,
    nonzeros,
    sparse_parts,
    stored,
    tensor_of,
)
from lit_pfl.core.header import METADATA, encoded_size, read_header, write_header
from lit_pfl.errors import PayloadError, UploadError
from lit_pfl.ops.low_rank import LowRank
from lit_pfl_callbacks.tensors import bytes_of

#: what names of tensors end in that hold packed bits, which say something of numbers but are none themselves
BITS = "#bits"
#: how many elements tensors in factors may have, all together, where nothing is expected of them
FROM_FACTORS = 2**24


def not_held(name: str, tensor: Tensor) -> str:
    """Say what is wrong with a tensor of a type that payloads do not hold; of others nothing."""
    if tensor.dtype in DTYPES:
        return ""
    return (
        f"tensor {name!r} is {tensor.dtype}, which a payload does not hold; real and whole numbers can be sent, and a "
        "complex tensor as its two real parts (torch.view_as_real)."
    )


class Payload(Mapping[str, Tensor]):
    """Named tensors on their way: a read-only mapping that knows its encoded size.

    The tensors are held by reference; nothing is copied until :meth:`to_bytes`.

    Args:
        tensors: the tensors by name.
        sparse: names whose zeros need not be sent (a sparse ``mu``, a masked weight).
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
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}; what is sent must be tensors, by name.")
        if METADATA in self._tensors:
            raise ValueError(f"A tensor cannot be named {METADATA!r}, which the encoding needs.")
        for names, what, parts in (
            (self.sparse, "sparse", sparse_parts),
            (self.low_rank, "given in factors", factor_parts),
        ):
            for name in names:
                if any(part in self._tensors for part in parts(name)):
                    taken = " and ".join(map(repr, parts(name)))
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

    def with_(self, tensors: Mapping[str, Tensor]) -> "Payload":
        """Return the same payload with others in the place of some of its tensors, and with further ones."""
        plain = {name: tensor for name, tensor in self.items() if name not in self.low_rank}
        left = {name: factors for name, factors in self.low_rank.items() if name not in tensors}
        return Payload({**plain, **tensors}, self.sparse, left)

    def without(self, name: str) -> "Payload":
        """Return the same payload without one of its plain tensors."""
        return Payload(
            {k: v for k, v in self.items() if k != name and k not in self.low_rank}, self.sparse, self.low_rank
        )

    def laid_out(self, names: Iterable[str], sparse: Iterable[str]) -> "Payload":
        """Return the same tensors in another order, and with others known as sparse.

        The encoding keeps neither: it sorts by type and name, and a tensor that was sent dense is not known as sparse.

        Raises:
            ValueError: when ``names`` are not all names.
        """
        names = list(names)
        if sorted(names) != sorted(self):
            raise ValueError(f"The payload holds {sorted(self)}, not {sorted(names)}.")
        payload = Payload({}, sparse)
        payload.low_rank, payload._tensors = self.low_rank, {name: self[name] for name in names}
        return payload

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
        nonzero = {name: nonzeros(self[name]) for name in self if name in self.sparse}
        in_factors = {name: factors.elements for name, factors in self.low_rank.items() if factors.saves}
        return {name: tensor.numel() for name, tensor in self.items()} | nonzero | in_factors | bits

    @property
    def elements(self) -> int:
        """Number of elements of all tensors, see :attr:`counts`."""
        return sum(self.counts.values())

    @property
    def layout(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shapes and types of the tensors."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.items()}

    @cached_property
    def _encodings(self) -> dict[str, Encoding]:
        return {name: self._encoding(name, tensor) for name, tensor in self.items()}

    def _encoding(self, name: str, tensor: Tensor) -> Encoding:
        shape = tuple(tensor.shape)
        if name in self.low_rank and self.low_rank[name].saves:
            return Factors(shape, tensor.dtype, self.low_rank[name].rank)
        if name in self.sparse and (sparse := Sparse(shape, tensor.dtype, stored(tensor))).saves:
            return sparse
        return Dense(shape, tensor.dtype)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor in :meth:`to_bytes`; names, types and shapes come on top."""
        return {
            name: sum(math.prod(shape) * dtype.itemsize for shape, dtype in encoding.parts(name).values())
            for name, encoding in self._encodings.items()
        }

    @cached_property
    def nbytes(self) -> int:
        """Exact length of :meth:`to_bytes`, without encoding; 0 when there is nothing to send."""
        return encoded_size(tuple(self._encodings.items())) if self else 0

    def to_bytes(self) -> bytes:
        """Encode.

        Raises:
            PayloadError: for a tensor of a type that payloads do not hold.
        """
        if not self:
            return b""
        tensors: dict[str, Tensor] = {}
        encodings: dict[str, Encoding] = {}  # as the tensors are now
        for name, tensor in self.items():
            if wrong := not_held(name, tensor):
                raise PayloadError(wrong, name)
            if tensor.layout != torch.strided:
                raise PayloadError(f"tensor {name!r} is {tensor.layout}, which has no bytes of its own.", name)
            encoding = encodings[name] = self._encoding(name, tensor)
            sent = self.low_rank[name] if isinstance(encoding, Factors) else tensor
            tensors |= zip(encoding.parts(name), encoding.encode(sent), strict=True)  # type: ignore[arg-type]
        header, parts = write_header(encodings)
        return b"".join([header, *(bytes_of(tensors[name]) for name in parts)])

    @classmethod
    def from_bytes(cls, data: bytes, expected: Layout | None = None, limit: int = FROM_FACTORS) -> "Payload":
        """Decode what :meth:`to_bytes` made. Marked as sparse, and held in factors, are the tensors that were sent so.

        Whatever the bytes are, they are a payload or a PayloadError: nothing is believed that does not follow from
        their number, and what :meth:`to_bytes` would not write is refused. The memory for it is at most a small
        multiple of theirs, next to ``limit``.

        Args:
            data: the bytes.
            expected: shapes and types of the tensors, by name, if they are known; others are refused.
            limit: how many elements tensors in factors may have, all together, where nothing is expected.

        Raises:
            PayloadError: when ``data`` is not such an encoding, or not of what is expected.
        """
        encodings, places = read_header(data) if data else ({}, {})
        if expected is not None:
            if wrong := misfit({name: (e.shape, e.dtype) for name, e in encodings.items()}, expected):
                raise PayloadError(*wrong)
        elif (elements := sum(math.prod(e.shape) for e in encodings.values() if isinstance(e, Factors))) > limit:
            raise PayloadError(f"the tensors in factors have {elements} elements, more than {limit}.")
        tensors: dict[str, Tensor] = {}
        low_rank: dict[str, LowRank] = {}
        for name, encoding in encodings.items():
            encoding.check(name)
            parts = encoding.parts(name).items()
            got = [tensor_of(places[part], part, *layout) for part, layout in parts]
            made = encoding.decode(name, *got)
            if isinstance(made, LowRank):
                low_rank[name] = made
            else:
                tensors[name] = made
        try:
            return cls(tensors, [name for name, e in encodings.items() if isinstance(e, Sparse)], low_rank)
        except ValueError as error:  # a name that another tensor's encoding needs
            raise PayloadError(str(error)) from None


def as_payload(tensors: Mapping[str, Tensor]) -> Payload:
    """Return tensors as a payload, which they may be already."""
    return tensors if isinstance(tensors, Payload) else Payload(tensors)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Say whether all values are finite; seldom no although they are, where finite ones add up to infinity.

    Args:
        tensors: of any shapes, on any devices. Those of whole numbers are finite.
    """
    elsewhere: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.is_floating_point():
            # in 32 bits at least, so that they can be stacked, and half precision adds up to less often
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            values = tensor.detach() if tensor.itemsize > 1 else tensor.detach().to(wide)
            total = values.sum(dtype=wide)
            if tensor.device.type != "cpu":  # to be waited for once
                elsewhere.setdefault(tensor.device, []).append(total.float())
            elif not math.isfinite(total.item()):
                return False
    return all(bool(torch.stack(totals).isfinite().all()) for totals in elsewhere.values())


#: what comes of a client's round, or what was wrong with it; such a client is back where it began the round
Upload = Mapping[str, Tensor] | UploadError
