"""What clients upload, between the processes of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_pfl.core.payload import Payload, Upload
from lit_pfl.engines.ranks import Ranks
from lit_pfl.errors import UploadError
from lit_pfl.ops.low_rank import LowRank


def of_all_ranks(ranks: Ranks, own: Mapping[int, Upload]) -> dict[int, Upload]:
    """Return what the clients of all processes upload, in the order of their ids.

    Tensors keep type, shape and lay-out in memory, marks and factors stay what they are, so that whatever is computed
    from them is the same in every process. They are to be used before the next exchange of any kind: they may be the
    clients' own memory, which changes when those train on.

    Args:
        ranks: the processes.
        own: uploads of this process's clients, by id.
    """
    if ranks.size == 1:
        return dict(sorted(own.items()))
    described: list[tuple[int, Any]] = []
    tensors: list[Tensor] = []
    for client, upload in own.items():
        description, parts = _packed(upload)
        described.append((client, description))
        tensors += parts
    uploads: dict[int, Upload] = {}
    for rank, told in enumerate(ranks.exchange(described, tensors, kept=True)):
        arrived = iter(told.tensors)
        for client, description in told.words:
            uploads[client] = own[client] if rank == ranks.rank else _unpacked(description, arrived)
    return dict(sorted(uploads.items()))


def alike(payloads: Mapping[int, Payload]) -> dict[int, Payload]:
    """Return payloads in which equal tensors of one name are one, so that they travel once: clients start alike."""
    first: dict[str, Tensor] = {}

    def known(name: str, tensor: Tensor) -> Tensor:
        one = first.setdefault(name, tensor)
        return one if one.shape == tensor.shape and one.dtype == tensor.dtype and torch.equal(one, tensor) else tensor

    return {
        client: payload
        if payload.low_rank
        else Payload({name: known(name, tensor) for name, tensor in payload.items()}, payload.sparse)
        for client, payload in payloads.items()
    }


def _packed(upload: Upload) -> tuple[Any, list[Tensor]]:
    if isinstance(upload, UploadError):
        return {"error": str(upload), "tensor": upload.tensor}, []
    low_rank = upload.low_rank if isinstance(upload, Payload) else {}
    plain = {name: tensor.detach() for name, tensor in upload.items() if name not in low_rank}
    factors = [factor.detach() for pair in low_rank.values() for factor in (pair.left, pair.right)]
    sparse = sorted(upload.sparse) if isinstance(upload, Payload) else []
    shapes = {name: factors.shape for name, factors in low_rank.items()}
    return [list(plain), sparse, shapes], [*plain.values(), *factors]


def _unpacked(description: Any, parts: Iterator[Tensor]) -> Upload:
    if isinstance(description, dict):
        return UploadError(description["error"], description["tensor"])
    names, sparse, shapes = description
    plain = {name: next(parts) for name in names}
    low_rank = {name: LowRank(next(parts), next(parts), tuple(shape)) for name, shape in shapes.items()}
    return Payload(plain, sparse, low_rank)
