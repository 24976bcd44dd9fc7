"""Whether tensors hold NaN or infinity."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Say whether all values are finite; seldom no although they are, where finite ones add up to infinity.

    Args:
        tensors: of any shapes, on any devices. Those of whole numbers are finite.
    """
    elsewhere: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            # in 32 bits at least, so that they can be stacked, and half precision adds up to less often
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.detach().sum(dtype=wide)
            if tensor.device.type != "cpu":  # to be waited for once
                elsewhere.setdefault(tensor.device, []).append(total.float())
            elif not math.isfinite(total.item()):
                return False
    return all(bool(torch.stack(totals).isfinite().all()) for totals in elsewhere.values())
