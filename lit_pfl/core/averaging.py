"""Means of payloads."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lit_pfl.core.payload import Payload

T = TypeVar("T")
#: tensors of at most this many elements are summed as one: a step for each takes longer than what it computes
SMALL = 2**13


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
    names = list(payloads[0] if names is None else names)
    terms = list(_terms(payloads, weights))
    mixtures = Mixtures([payload for payload, _ in terms], names, keep=False)
    return Payload(mixtures.mean([weight for _, weight in terms], names), payloads[0].sparse)


class Mixtures:
    """Takes several means of the same payloads, each as :func:`weighted_mean` does.

    Args:
        payloads: J payloads, whose tensors do not change.
        names: what there are means of.
        keep: whether a copy of small tensors is kept, as pays for several means; it may take as much memory as they do.
    """

    @torch.no_grad()
    def __init__(self, payloads: Sequence[Payload], names: Iterable[str], keep: bool = True) -> None:
        self.payloads = payloads
        packs: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in names:
            if _is_small(name, payloads):
                packs.setdefault((payloads[0][name].dtype, payloads[0][name].device), []).append(name)
        #: names, and of every payload one tensor of all that they name; or None
        self._packs = [(pack, [*self._laid_out(pack)] if keep else None) for pack in packs.values() if len(pack) > 1]

    def _laid_out(self, pack: Sequence[str]) -> Iterator[Tensor]:
        for payload in self.payloads:
            yield torch.cat([payload[name].flatten() for name in pack])

    @torch.no_grad()
    def mean(self, weights: Sequence[float], names: Iterable[str]) -> dict[str, Tensor]:
        """Return one mean, by J weights, of some of the tensors."""
        small: dict[str, Tensor] = {}
        for pack, tensors in self._packs:
            if any(weights):
                like = [self.payloads[0][name] for name in pack]
                total = _weighted_sum(_terms(tensors or self._laid_out(pack), weights))
                parts = total.split([tensor.numel() for tensor in like])
                # clones, so that whoever keeps one does not keep them all
                small |= {n: part.view_as(one).clone() for n, part, one in zip(pack, parts, like, strict=True)}
        of_all = list(_terms(self.payloads, weights))
        own = ((name, [] if name in small else _terms_of(name, of_all)) for name in names)
        means = ((name, _weighted_sum(terms) if terms else small.get(name)) for name, terms in own)
        return {name: mean for name, mean in means if mean is not None}


def _is_small(name: str, payloads: Sequence[Payload]) -> bool:
    """Say whether a tensor has few elements, and is there in every payload in the same form."""
    first = payloads[0].get(name) if payloads else None
    return (
        first is not None
        and first.numel() <= SMALL
        and all(
            name in payload
            and (own := payload[name]).layout is torch.strided
            and (own.shape, own.dtype, own.device) == (first.shape, first.dtype, first.device)
            and own.is_contiguous()
            for payload in payloads
        )
    )


def _terms(values: Iterable[T], weights: Sequence[float]) -> Iterator[tuple[T, float]]:
    return ((value, weight) for value, weight in zip(values, weights, strict=True) if weight != 0)


def _terms_of(name: str, terms: Sequence[tuple[Payload, float]]) -> list[tuple[Tensor, float]]:
    """Return a tensor of every payload that has it, with weights that sum to what all weights sum to."""
    own = [(payload[name], weight) for payload, weight in terms if name in payload]
    if len(own) == len(terms) or not own:
        return own
    scale = sum(weight for _, weight in terms) / sum(weight for _, weight in own)
    return [(tensor, weight * scale) for tensor, weight in own]


def _weighted_sum(terms: Iterable[tuple[Tensor, float]]) -> Tensor:
    others = iter(terms)
    first, weight = next(others)
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
