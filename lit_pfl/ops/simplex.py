"""Weights that are not negative and sum to a given number."""

import numpy as np
import torch
from scipy.optimize import nnls  # type: ignore[import-untyped]
from torch import Tensor


def project_onto_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """Return the point of the simplex that is nearest to ``values`` in the Euclidean sense.

    Args:
        values: (n,) float tensor.
        total: what the entries of the result sum to, above 0.

    Returns:
        (n,) tensor, ``max(values - theta, 0)`` with the one theta that makes it sum to ``total``.

    Raises:
        ValueError: when ``total`` is not above 0.

    Source:
        Held, Wolfe and Crowder 1974; Duchi et al. 2008, Figure 1.

    Example:
        >>> project_onto_simplex(torch.tensor([0.5, 0.25, -1.0]))
        tensor([0.6250, 0.3750, 0.0000])
    """
    return rows_onto_simplex(values[None], total)[0]


def rows_onto_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """Return what :func:`project_onto_simplex` makes of every row of an (N, n) tensor."""
    if total <= 0:
        raise ValueError(f"Nothing but zeros sums to {total}; total must be above 0.")
    # changes nothing but keeps a total that is tiny beside the values from being lost
    values = values - values.amax(1, keepdim=True)
    largest = values.sort(descending=True).values
    # theta if exactly the k largest entries stay above zero; the right k is the last that holds its k-th entry above
    counts = torch.arange(1, values.shape[1] + 1, dtype=values.dtype, device=values.device)
    thetas = (largest.cumsum(1) - total) / counts
    last = (largest > thetas).sum(1, keepdim=True) - 1
    return (values - thetas.gather(1, last)).clamp(min=0)


def smallest_on_simplex(vectors: Tensor) -> Tensor:
    """Return the point ``a`` of the simplex that minimizes the length of ``sum_j a_j x_j``.

    It is solved as nonnegative least squares of ``sum_j u_j x_j = 0`` and ``sum_j u_j = 1``; then a is u divided by its
    sum. Of all multiples of a point whose length is l, the best one leaves an error of ``l^2 / (1 + l^2)``, which grows
    with l: so the point of the best u is that of the smallest length.

    Args:
        vectors: (d, n), the n vectors x as columns.

    Returns:
        (n,) tensor in double precision, not negative, of sum 1.

    Source:
        Lawson and Hanson 1974, chapter 23.

    Example:
        >>> smallest_on_simplex(torch.diag(torch.tensor([1.0, 3.0]).sqrt()))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    columns = vectors.double().cpu().numpy()
    length = np.linalg.norm(columns, axis=0).mean()  # divided by it, vectors are as long as what stands for the sum
    if not length:  # all points are as good
        return torch.full(vectors.shape[1:], 1 / vectors.shape[1], dtype=torch.float64)
    rows = np.vstack([columns / length, np.ones(columns.shape[1])])
    found, _ = nnls(rows, np.append(np.zeros(len(columns)), 1.0))
    return torch.from_numpy(found / found.sum())
