"""How similar clients are, with whom each exchanges, and how much it takes from them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


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
