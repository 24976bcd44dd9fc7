"""Which clients belong together."""

from typing import Literal

import torch
from torch import Tensor

Linkage = Literal["complete", "single"]


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
