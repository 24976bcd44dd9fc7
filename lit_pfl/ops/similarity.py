"""How alike clients are, and how much each takes from the others."""

import torch
from torch import Tensor


def cosine_similarity_matrix(vectors: Tensor) -> Tensor:
    """Return the cosine of every two rows of a (K, d) tensor as (K, K), with exactly 1 on the diagonal.

    A zero row is similar to itself only.
    """
    directions = torch.nn.functional.normalize(vectors.double(), dim=1)
    return (directions @ directions.T).clamp(-1, 1).fill_diagonal_(1)


def matching_weights(similarity: Tensor, tau: float, alpha: float) -> Tensor:
    """Turn similarities into mixing weights: a softmax over the clients that are similar enough.

    Row k is ``softmax(alpha * similarity[k, j])`` over the ``j`` with ``similarity[k, j] >= tau``; the others get 0. A
    row where no one matches, not even client k itself (``tau`` above 1), is client k alone.

    Args:
        similarity: (K, K).
        tau: threshold.
        alpha: scale of the similarities.

    Returns:
        (K, K), rows sum to 1.

    Source:
        SimFed, Eq. 3 (the set is built by its condition, so those below the threshold take no part) and Eq. 8.
    """
    matched = similarity >= tau
    matched |= torch.diag(~matched.any(dim=1))
    return torch.softmax((alpha * similarity).masked_fill(~matched, -torch.inf), dim=1)
