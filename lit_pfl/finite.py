"""Whether tensors hold NaN or infinity."""

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Say whether all values are finite; seldom no although they are, where finite ones add up to infinity.

    Args:
        tensors: of any shapes, on any devices. Those of whole numbers are finite.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            # in 32 bits at least, so that they can be stacked, and half precision adds up to less often
            wide = torch.promote_types(tensor.dtype, torch.float32)
            sums.setdefault(tensor.device, []).append(tensor.detach().sum(dtype=wide).float())
    return all(bool(torch.stack(parts).isfinite().all()) for parts in sums.values())
