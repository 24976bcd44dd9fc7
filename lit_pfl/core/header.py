"""The header of an encoded payload: written in one way only, and read strictly.

The layout is that of safetensors: 8 bytes of header length, a JSON header, and the tensors' own bytes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from lit_pfl.core.encoding import DTYPES, Dense, Encoding, Factors, Parts, Shape, Sparse
from lit_pfl.errors import PayloadError

#: the one name that a tensor may not have
METADATA = "__metadata__"
#: under what the header says which shapes tensors have that do not travel as they are
_MARKS: dict[str, type[Sparse] | type[Factors]] = {"sparse": Sparse, "low_rank": Factors}
_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
#: more entries than any memory has, and few enough for 64 bits
_TOO_MANY = 2**60

_quoted = json.JSONEncoder(ensure_ascii=False).encode

_TEXT = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NUMBER = r"[0-9]{1,18}+"
_METADATA = re.compile(rf'{{"{METADATA}":{{"([a-z_]++)":({_TEXT})(?:,"([a-z_]++)":({_TEXT}))?}},')
_SHAPE = re.compile(rf"({_TEXT}): \[((?:{_NUMBER}, ){{0,63}}{_NUMBER})?\](?:, |}})")
_PART = re.compile(
    rf'({_TEXT}):{{"dtype":"([A-Z0-9]++)","shape":\[((?:{_NUMBER},){{0,63}}{_NUMBER})?\],'
    rf'"data_offsets":\[{_NUMBER},{_NUMBER}\]}}[,}}]'
)


def write_header(encodings: Mapping[str, Encoding], marks: Sequence[str] = tuple(_MARKS)) -> tuple[bytes, Parts]:
    """Return the length and text of a header, and the parts in the order in which their bytes follow.

    Args:
        encodings: of every tensor, by name.
        marks: in which order to say which tensors are sparse and which in factors.
    """
    shapes = {
        mark: {name: encoding.shape for name, encoding in encodings.items() if isinstance(encoding, _MARKS[mark])}
        for mark in marks
    }
    metadata = [f"{_quoted(mark)}:{_quoted(json.dumps(by_name))}" for mark, by_name in shapes.items() if by_name]
    # entry by entry: of all at once, json makes objects that take twenty times the header's bytes
    entries = [f'"{METADATA}":{{{",".join(metadata)}}}'] if metadata else []
    parts = [part for name, encoding in encodings.items() for part in encoding.parts(name).items()]
    parts.sort(key=lambda part: (_ORDER[part[1][1]], part[0]))  # as safetensors does
    end = 0
    for name, (shape, dtype) in parts:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        place = f'"shape":[{",".join(map(str, shape))}],"data_offsets":[{start},{end}]'
        entries.append(f'{_quoted(name)}:{{"dtype":"{DTYPES[dtype]}",{place}}}')
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, dict(parts)


@lru_cache(maxsize=64)
def encoded_size(encodings: tuple[tuple[str, Encoding], ...]) -> int:
    """Return the number of bytes of tensors that are encoded so, header included."""
    header, parts = write_header(dict(encodings))
    return len(header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts.values())


def read_header(data: bytes) -> tuple[dict[str, Encoding], dict[str, memoryview]]:
    """Return how tensors are encoded, the dense ones first, and the bytes of every part.

    Nothing is believed: the header is written again from what it says, and must be the same. So sizes and places of all
    parts follow from each other, and there is one encoding of a payload only.

    Raises:
        PayloadError: when the data is not a payload.
    """
    length = 8 + int.from_bytes(data[:8], "little")
    if length > len(data):
        raise PayloadError(f"the payload of {len(data)} bytes ends within its header.")
    try:
        encodings, marks = _encodings(data[8:length].decode())
        header, parts = write_header(encodings, marks)
    except PayloadError:
        raise
    except (ValueError, KeyError, IndexError):  # of text that is none, and of parts and types that are not there
        header, parts = b"", {}
    if header != data[:length] or not parts:  # no tensors are no bytes
        raise PayloadError("the header is not as payloads write it.")
    places, end = {}, length
    for name, (shape, dtype) in parts.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places[name] = memoryview(data)[start:end]
    if end != len(data):
        raise PayloadError(f"the payload has {len(data)} bytes; by its header it must have {end}.")
    return encodings, places


def _encodings(text: str) -> tuple[dict[str, Encoding], list[str]]:
    """Return what a header says, and in which order it says what is sparse and what in factors."""
    marked: dict[str, dict[str, Shape]] = {}
    at = 1
    if found := _METADATA.match(text):
        mark, shapes, other, more = found.groups()
        marked = {mark: _shapes(shapes)} | ({other: _shapes(more)} if other else {})
        at = found.end()
    parts: Parts = {}
    while found := _PART.match(text, at):
        parts[json.loads(found[1])], at = (_shape(found[3]), _BY_CODE[found[2]]), found.end()
    encodings: dict[str, Encoding] = {}
    for mark, by_name in marked.items():
        for name, shape in by_name.items():
            if name in encodings:
                raise PayloadError(f"tensor {name!r} is encoded twice.", name)
            encodings[name] = _MARKS[mark].of(name, shape, parts)
    dense = {name: Dense(*part) for name, part in parts.items()}
    if twice := dense.keys() & encodings.keys():
        raise PayloadError(f"tensor {min(twice)!r} is encoded twice.", min(twice))
    return dense | encodings, list(marked)


def _shapes(quoted: str) -> dict[str, Shape]:
    text, at, shapes = json.loads(quoted), 1, {}
    while found := _SHAPE.match(text, at):
        shapes[json.loads(found[1])], at = _shape(found[2]), found.end()
    return shapes


def _shape(text: str | None) -> Shape:
    shape = tuple(int(size) for size in text.split(",")) if text else ()
    if math.prod(max(size, 1) for size in shape) > _TOO_MANY:
        raise PayloadError(f"a tensor of shape {shape} is larger than any memory.")
    return shape
