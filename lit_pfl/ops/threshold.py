"""Proximal operators."""

from torch import Tensor
from torch.nn.functional import softshrink


def soft_threshold(x: Tensor, threshold: float) -> Tensor:
    """Return ``sign(x) max(|x| - threshold, 0)``, the proximal operator of ``threshold * ||x||_1``.

    Zeros are +0: a -0.0 would be sent.
    """
    return softshrink(x, threshold) + 0.0
