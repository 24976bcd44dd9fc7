"""How far apart models are, and how similar in direction, as matrices over clients."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def squared_distances(models: Sequence[Mapping[str, Tensor]], names: Iterable[str]) -> Tensor:
    """Return ``|w_i - w_j|^2`` of every two of K models, over the tensors of these names, as (K, K) double.

    Args:
        models: K models, tensors by name.
        names: which tensors to compare; those of one name have one shape.
    """
    total = _square(models)
    for name in names:
        rows = _rows(models, name)
        total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square().to(total.device)
    return total


def cosines(models: Sequence[Mapping[str, Tensor]], names: Iterable[str]) -> Tensor:
    """Return the cosine of every two of K models, over the tensors of these names, as (K, K) double.

    It is exactly 1 on the diagonal. A model of zeros is similar to itself only.

    Args:
        models: K models, tensors by name.
        names: which tensors to compare; those of one name have one shape.
    """
    products = _square(models)
    for name in names:
        rows = _rows(models, name)
        products += (rows @ rows.T).to(products.device)
    lengths = products.diagonal().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return (products / lengths[:, None] / lengths).clamp(-1, 1).fill_diagonal_(1)


def _square(models: Sequence[Mapping[str, Tensor]]) -> Tensor:
    return torch.zeros(len(models), len(models), dtype=torch.float64)


def _rows(models: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.stack([model[name].detach().double().flatten() for model in models])
