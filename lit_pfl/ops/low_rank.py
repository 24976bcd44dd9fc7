"""Low-rank approximation."""

import torch
from torch import Tensor


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return u and v such that ``u v^T`` is the best approximation of a matrix by one of a given rank.

    The singular values are divided evenly, ``u = U S^(1/2)`` and ``v = V S^(1/2)``, and the largest entry in size of
    every column of u is positive, so that the same matrix has the same factors anywhere.

    Args:
        matrix: (rows, columns), finite.
        rank: number of columns of the factors, at most that of the matrix's smaller side; 1 or more.

    Returns:
        u, (rows, rank), and v, (columns, rank), in double precision. Columns beyond the matrix's own rank are zero.

    Source:
        Eckart and Young 1936; Khodak et al. 2021, spectral initialization.

    Example:
        >>> u, v = low_rank_factors(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), rank=1)
        >>> u @ v.T
        tensor([[3., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    matrix = matrix.detach().double()
    if len(matrix) > matrix.shape[1]:
        v, u = _factors(matrix.T, rank)
    else:
        u, v = _factors(matrix, rank)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    return u * sign, v * sign


def _factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors, but for their signs, of a matrix with at least as many columns as rows."""
    # Of the smaller square of the two: several times faster than a singular value decomposition, and in double
    # precision exact enough for weights in single precision.
    squares, left = torch.linalg.eigh(matrix @ matrix.T)
    squares, left = squares.flip(0), left.flip(1)[:, :rank]
    none = squares <= squares[0].abs() * len(squares) * torch.finfo(squares.dtype).eps
    values = squares.masked_fill(none, 0)[:rank].sqrt()
    root = values.sqrt()
    return left * root, matrix.T @ left / root.where(values > 0, torch.inf)
