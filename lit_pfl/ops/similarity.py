"""How similar clients are, who belongs together, with whom each exchanges, and how much it takes from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Linkage = Literal["complete", "single"]


def cosine_similarity_matrix(vectors: Tensor) -> Tensor:
    """Return the cosine of every two rows of a (K, d) tensor as (K, K), with exactly 1 on the diagonal.

    A zero row is similar to itself only.
    """
    directions = torch.nn.functional.normalize(vectors.double(), dim=1)
    return (directions @ directions.T).clamp(-1, 1).fill_diagonal_(1)


def most_similar(similarity: Tensor, tau: float, at_least: int = 1) -> Tensor:
    """Choose for every client those whose similarity to it reaches a threshold.

    Args:
        similarity: (K, K).
        tau: threshold.
        at_least: the most similar are chosen up to this number even below the threshold; each client is its own first.

    Returns:
        (K, K) bool; row k marks the partners of client k.

    Source:
        SimFed, Eq. 3; Factorized-FL, Section 4.
    """
    return (similarity >= tau) | _first(similarity.clone().fill_diagonal_(torch.inf), at_least)


def least_similar(similarity: Tensor, others: int) -> Tensor:
    """Return for every client itself and those that are least similar to it, as (K, K) bool.

    Args:
        similarity: (K, K).
        others: how many there are besides the client itself.
    """
    return _first((-similarity).fill_diagonal_(torch.inf), others + 1)


def random_others(similarity: Tensor, others: int, rng: np.random.Generator) -> Tensor:
    """Return for every client itself and others drawn at random, as (K, K) bool.

    Args:
        similarity: (K, K); only its shape and device matter.
        others: how many there are besides the client itself.
        rng: draws them.
    """
    draws = torch.from_numpy(rng.random(similarity.shape)).to(similarity.device)
    return _first(draws.fill_diagonal_(torch.inf), others + 1)


def _first(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` highest scores of every row; of equal ones, those of the first columns."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def softmax_over(partners: Tensor, similarity: Tensor, scale: float) -> Tensor:
    """Turn similarities into mixing weights.

    Args:
        partners: (K, K) bool; those that take part. Others get weight 0, not that of similarity 0.
        similarity: (K, K).
        scale: factor of the similarities.

    Returns:
        (K, K); row k is ``softmax(scale * similarity[k])`` over the partners of client k, and sums to 1.

    Source:
        SimFed, Eq. 8 (alpha); Factorized-FL, Eq. 5 (epsilon).
    """
    return torch.softmax((scale * similarity).masked_fill(~partners, -torch.inf), dim=1)


def one_after_another(weights: Tensor, order: list[int]) -> Tensor:
    """Return the weights of mixtures that are made in place: each client mixes what earlier ones have mixed already.

    Args:
        weights: (K, K), rows sum to 1.
        order: rows in the order in which they are updated; rows that are not in it stay as they are given.

    Returns:
        (K, K) weights of what was there before, rows sum to 1.
    """
    state = torch.eye(len(weights), dtype=weights.dtype, device=weights.device)
    result = weights.clone()
    for row in order:
        state[row] = result[row] = weights[row] @ state
    return result


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the squares of all differences between tensors of the same names, those of ``b``."""
    return torch.stack([(a[name] - b[name]).square().sum() for name in b]).sum()


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


def bipartition(similarity: Tensor, linkage: Linkage = "complete") -> Tensor:
    """Divide clients into two groups by agglomerative clustering.

    Args:
        similarity: (K, K), symmetric, of at least 2 clients.
        linkage: how similar two groups are: as their least similar members (``complete``) or as their most similar ones
            (``single``). The latter minimizes the largest similarity across the two groups.

    Returns:
        (K,) bool; marks the group that the first client is not in.

    Source:
        Sattler et al. 2020: Algorithm 1 there is single linkage, their released code has complete linkage.
    """
    from sklearn.cluster import AgglomerativeClustering  # here, since it takes a second to import

    clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage)
    labels = torch.from_numpy(clustering.fit_predict((1 - similarity).cpu().numpy()))
    return (labels != labels[0]).to(similarity.device)
