"""Weights that are not negative and sum to a given number."""

import torch
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


def minimize_on_simplex(matrices: Tensor, steps: int = 2000, tolerance: float = 1e-12) -> Tensor:
    """Return the points a of the simplex that minimize ``a^T Q a``, by projected gradients with momentum.

    Args:
        matrices: (N, n, n) symmetric and positive semidefinite, in double precision.
        steps: how many at most.
        tolerance: the change of all entries at which to stop.

    Returns:
        (N, n), rows not negative, of sum 1.

    Source:
        Beck and Teboulle 2009 (FISTA), with restarts of the momentum where it leads upwards.

    Example:
        >>> minimize_on_simplex(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))[None])
        tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    size = matrices.shape[-1]
    largest = matrices.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(matrices.dtype).tiny)
    scaled = matrices / largest[:, None, None]  # now no eigenvalue is above 1
    a = torch.full((len(matrices), size), 1 / size, dtype=matrices.dtype, device=matrices.device)
    ahead, t = a, torch.ones(len(matrices), 1, dtype=matrices.dtype, device=matrices.device)
    for _ in range(steps):
        target = ahead - (scaled @ ahead[:, :, None])[:, :, 0]
        new = rows_onto_simplex(target)
        upwards = ((ahead - new) * (new - a)).sum(1, keepdim=True) > 0
        t = torch.where(upwards, torch.ones_like(t), t)
        following = (1 + (1 + 4 * t.square()).sqrt()) / 2
        moved, a = new - a, new
        ahead, t = torch.where(upwards, a, a + (t - 1) / following * moved), following
        if float(moved.abs().max()) < tolerance:
            break
    return a
