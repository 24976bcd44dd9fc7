"""Means of payloads."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_pfl.payload import Payload


@torch.no_grad()
def weighted_mean(payloads: Sequence[Payload], weights: Sequence[float], names: Iterable[str] | None = None) -> Payload:
    """Sum payloads of equal lay-out, each times its weight.

    Every product and sum is rounded by itself, in the given order, so the result does not depend on the machine. A
    weight of 0 leaves its payload out altogether, and a single weight of 1 returns that payload's values unchanged.

    Args:
        payloads: J payloads with the same names and shapes.
        weights: J numbers that sum to 1.
        names: which tensors to average; by default all of the first payload's.

    Returns:
        A payload of new tensors; integer tensors are rounded to the nearest.
    """
    terms = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight != 0]
    wanted = list(payloads[0]) if names is None else list(names)
    return Payload({name: _weighted_sum([(p[name], w) for p, w in terms]) for name in wanted}, payloads[0].sparse)


def _weighted_sum(terms: list[tuple[Tensor, float]]) -> Tensor:
    (first, weight), *others = terms
    if not first.is_floating_point():  # whole numbers, exact up to 2^53
        return _weighted_sum([(tensor.double(), weight) for tensor, weight in terms]).round().to(first.dtype)
    total = first * weight
    term = torch.empty_like(total)  # one for all: fresh memory would take longer than the sum
    for tensor, weight in others:
        total += torch.mul(tensor, weight, out=term)
    return total
