"""Payloads as records of Flower's messages."""

import json
import re
from collections.abc import Mapping
from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from lit_pfl.core.encoding import Layout
from lit_pfl.core.payload import FROM_FACTORS, Payload
from lit_pfl.errors import PayloadError, UploadError

PAYLOADS, LAYOUT = "payloads", "layout"
#: what names begin with, among a model's scores, of what else is told of it
SIZE = "size/"


def pack(payloads: Mapping[int, Payload]) -> RecordDict:
    """Return payloads as records: of each one array of bytes, its encoding, so that what is counted is what is sent.

    Next to it goes what the encoding leaves out and in-process clients see, so that sums are made in the same order:
    the order of the names, and which tensors are known as sparse.
    """
    arrays, layout = ArrayRecord(), ConfigRecord()
    for client, payload in payloads.items():
        arrays[str(client)] = Array(np.frombuffer(bytearray(payload.to_bytes()), dtype=np.uint8))
        layout[str(client)] = json.dumps({"names": list(payload), "sparse": sorted(payload.sparse)})
    return RecordDict({PAYLOADS: arrays, LAYOUT: layout})


def clients_in(records: RecordDict) -> list[int]:
    """Return the ids of the clients that a message holds payloads of."""
    names = records.array_records.get(PAYLOADS, ())
    if wrong := [name for name in names if not re.fullmatch("0|[1-9][0-9]{0,17}", name)]:
        raise ValueError(f"{wrong[0][:20]!r} is not a client's id")  # of which 7 and 07 would be two
    return sorted(map(int, names))


def unpack(records: RecordDict, client: int, expected: Layout | None = None, limit: int = FROM_FACTORS) -> Payload:
    """Return a client's payload; see :meth:`~lit_pfl.Payload.from_bytes`.

    Raises:
        UploadError: when there is none, or one that cannot be decoded.
    """
    try:
        data = _bytes(records.array_records[PAYLOADS][str(client)])
        names, sparse = _layout(str(records.config_records[LAYOUT][str(client)]))
        return Payload.from_bytes(data, expected, limit).laid_out(names, sparse)
    except PayloadError as error:
        raise UploadError(f"Client {client}: {error}", error.tensor) from error
    except Exception as error:  # whatever Flower's records stumble over
        raise UploadError(f"Client {client}: its payload cannot be decoded ({error!r}).") from error


def _bytes(array: Array) -> bytes:
    """Return what an array of bytes holds. NumPy would believe the size that the array claims to have."""
    file = BytesIO(array.data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=200)
    data = file.read()
    if dtype != np.uint8 or shape != (len(data),):
        raise ValueError(f"an array of {dtype} {shape} in {len(data)} bytes")
    return data


_NAMES = r'\[(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"(?:, (?="))?)*+\]'  # no list in a list


def _layout(text: str) -> tuple[list[str], list[str]]:
    if not re.fullmatch(rf'{{"names": {_NAMES}, "sparse": {_NAMES}}}', text):
        raise ValueError("no lists of names")
    layout = json.loads(text)
    return layout["names"], layout["sparse"]
