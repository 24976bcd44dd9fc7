"""Means of payloads."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_pfl.core.payload import Payload


@torch.no_grad()
def weighted_mean(payloads: Sequence[Payload], weights: Sequence[float], names: Iterable[str] | None = None) -> Payload:
    """Sum payloads of equal layout, each times its weight.

    Every product and sum is rounded on its own, in the given order, so the result does not depend on the machine; of
    tensors in half precision to single precision, and the result once more. A weight of 0 leaves its payload out
    altogether, and a single weight of 1 returns that payload's values unchanged.

    Args:
        payloads: J payloads with the same names and shapes. Of a tensor that only some of them have, as one that has
            just been unfrozen somewhere, the mean is over these; one that none of them has is left out.
        weights: J numbers that sum to 1.
        names: which tensors to average; by default all of the first payload's.

    Returns:
        A payload of new tensors; integer tensors are rounded to the nearest.
    """
    terms = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight != 0]
    wanted = ((name, _terms_of(name, terms)) for name in (payloads[0] if names is None else names))
    return Payload({name: _weighted_sum(own) for name, own in wanted if own}, payloads[0].sparse)


def _terms_of(name: str, terms: Sequence[tuple[Payload, float]]) -> list[tuple[Tensor, float]]:
    """Return a tensor of every payload that has it, with weights that sum to what all weights sum to."""
    own = [(payload[name], weight) for payload, weight in terms if name in payload]
    if len(own) == len(terms) or not own:
        return own
    scale = sum(weight for _, weight in terms) / sum(weight for _, weight in own)
    return [(tensor, weight * scale) for tensor, weight in own]


def _weighted_sum(terms: list[tuple[Tensor, float]]) -> Tensor:
    (first, weight), *others = terms
    wide = wide_type(first)
    total = first.to(wide) * weight
    term = torch.empty_like(total)  # one for all: fresh memory would take longer than the sum
    for tensor, weight in others:
        total += torch.mul(tensor.to(wide), weight, out=term)
    return (total if first.is_floating_point() else total.round()).to(first.dtype)


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which to add up: in half precision a sum of many loses what is added last."""
    if not tensor.is_floating_point():
        return torch.float64  # whole numbers, exact up to 2^53
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def mean_of_rows(parts: Sequence[tuple[Tensor, Tensor, float]], before: Tensor) -> Tensor:
    """Average every row of a tensor over those who have it.

    As in :func:`weighted_mean`, every product and sum is rounded on its own, in the given order, of half precision to
    single precision.

    Args:
        parts: of each who has some: (r, ...) rows; (r,) which rows of the whole these are, each once; and a weight
            above 0. The weights of those who have a row are divided by their sum.
        before: (n, ...) the whole; rows that nobody has keep its values.

    Returns:
        (n, ...) the new whole.

    Source:
        Psi-Net, Eq. 7 and 8.
    """
    mass = torch.zeros(len(before), dtype=torch.float64)
    for _, rows, weight in parts:
        mass[rows] += weight
    total = torch.zeros_like(before, dtype=wide_type(before))
    for tensor, rows, weight in parts:
        share = (weight / mass[rows]).to(total).view(-1, *[1] * (before.dim() - 1))
        total.index_add_(0, rows.to(before.device), tensor * share)
    total = total.to(before.dtype)
    nobody = (mass == 0).nonzero().flatten().to(before.device)
    return total.index_copy_(0, nobody, before[nobody])
