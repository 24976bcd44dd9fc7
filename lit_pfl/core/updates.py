"""By how much an upload differs from what its client trained from."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lit_pfl.core.payload import Payload
from lit_pfl.ops.robust import inner_product

Tensors = Mapping[str, Tensor]


def update_of(upload: Tensors, center: Tensors, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return by how much an upload's floating-point tensors differ from what its client trained from.

    Args:
        upload: the upload.
        center: see :meth:`lit_pfl.Server.center`; a tensor that it lacks, or has in another shape, is an update itself.
        names: tensors to look at; by default all.

    Returns:
        Tensors of double precision.
    """
    update = {}
    for name in upload if names is None else names:
        if name in upload and upload[name].is_floating_point():
            tensor = upload[name].double()
            before = center.get(name)
            if before is not None and before.shape == tensor.shape:
                tensor = tensor - before.to(tensor)
            update[name] = tensor
    return update


def updated(upload: Payload, center: Tensors, update: Tensors) -> Payload:
    """Return an upload whose update, see :func:`update_of`, is another one."""
    tensors = {}
    for name, tensor in update.items():
        before = center.get(name)
        if before is not None and before.shape == tensor.shape:
            tensor = before.to(tensor) + tensor
        tensors[name] = tensor.to(upload[name].dtype)
    return upload.with_(tensors)


def update_norm(upload: Tensors, center: Tensors, names: Sequence[str] | None = None) -> float:
    """Return the Euclidean norm of an update, see :func:`update_of`."""
    return norm_of(update_of(upload, center, names))


def norm_of(tensors: Tensors) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.sqrt(sum(inner_product(tensor, tensor) for tensor in tensors.values()))
