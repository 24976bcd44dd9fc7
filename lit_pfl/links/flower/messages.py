"""Payloads as records of Flower's messages."""

import json
from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError

from lit_pfl.errors import UploadError
from lit_pfl.payload import Payload

PAYLOADS, LAYOUT = "payloads", "layout"
#: what names begin with, among a model's scores, of what else is told of it
SIZE = "size/"


def pack(payloads: Mapping[int, Payload]) -> RecordDict:
    """Return payloads as records: of each one array of bytes, its encoding, so that what is counted is what is sent.

    Beside it goes what the encoding leaves out and in-process clients see, so that sums are made in the same order: the
    order of the names, and which tensors are known as sparse.
    """
    arrays, layout = ArrayRecord(), ConfigRecord()
    for client, payload in payloads.items():
        arrays[str(client)] = Array(np.frombuffer(bytearray(payload.to_bytes()), dtype=np.uint8))
        layout[str(client)] = json.dumps({"names": list(payload), "sparse": sorted(payload.sparse)})
    return RecordDict({PAYLOADS: arrays, LAYOUT: layout})


def clients_in(records: RecordDict) -> list[int]:
    """Return the ids of the clients that a message holds payloads of."""
    return sorted(int(client) for client in records.array_records.get(PAYLOADS, ()))


def unpack(records: RecordDict, client: int) -> Payload:
    """Return a client's payload.

    Raises:
        UploadError: when there is none, or one that cannot be decoded.
    """
    try:
        data = records.array_records[PAYLOADS][str(client)].numpy().tobytes()
        layout = json.loads(str(records.config_records[LAYOUT][str(client)]))
        return Payload.from_bytes(data).laid_out(layout["names"], layout["sparse"])
    except (KeyError, TypeError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        raise UploadError(f"Client {client}: its payload cannot be decoded ({error!r}).") from error
