"""What weights are made simple to: low rank, or zeros."""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from lit_pfl.core.payload import Payload
from lit_pfl.ops import soft_threshold, threshold_singular_values
from lit_pfl.ops.low_rank import LowRank, as_matrix

StructureName = Literal["low_rank", "sparse"]


class Structure(Protocol):
    """What makes weights simple: its proximal operator, and how many parameters then are left."""

    def shrink(self, weights: Mapping[str, Tensor], threshold: float, near: Mapping[str, LowRank]) -> Payload:
        """Shrink weights by ``threshold``; ``near`` are weights that the result may be expected to be like."""

    def size(self, weight: Tensor) -> int:
        """Return the number of parameters of a weight that has been shrunk."""


class LowRankStructure:
    """Low rank of weights of two or more dimensions, as matrices (:func:`~lit_pfl.ops.low_rank.as_matrix`)."""

    def shrink(self, weights: Mapping[str, Tensor], threshold: float, near: Mapping[str, LowRank]) -> Payload:
        """Shrink singular values."""
        names = [name for name, weight in weights.items() if weight.dim() > 1]
        starts = [near[name].right if name in near else None for name in names]
        factors = threshold_singular_values([as_matrix(weights[name]) for name in names], threshold, starts)
        low_rank = {name: LowRank(*f, tuple(weights[name].shape)) for name, f in zip(names, factors, strict=True)}
        return Payload({name: w for name, w in weights.items() if name not in low_rank}, low_rank=low_rank)

    def size(self, weight: Tensor) -> int:
        """Count the elements of its factors, or its own if these are fewer."""
        if weight.dim() < 2:
            return weight.numel()
        matrix = as_matrix(weight).to(torch.promote_types(weight.dtype, torch.float32))
        return min(weight.numel(), int(torch.linalg.matrix_rank(matrix)) * sum(matrix.shape))


class SparseStructure:
    """Zeros among the entries."""

    def shrink(self, weights: Mapping[str, Tensor], threshold: float, near: Mapping[str, LowRank]) -> Payload:
        """Shrink every entry."""
        return Payload({name: soft_threshold(weight, threshold) for name, weight in weights.items()}, sparse=weights)

    def size(self, weight: Tensor) -> int:
        """Count the entries that are not zero."""
        return int(torch.count_nonzero(weight))


STRUCTURES: dict[str, Structure] = {"low_rank": LowRankStructure(), "sparse": SparseStructure()}
