"""Weights as products of two small matrices."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """A weight of low rank, in factors.

    Args:
        left: (rows, r).
        right: (r, columns).
        shape: shape of the weight whose matrix is ``left @ right``, see :func:`as_matrix`.

    Raises:
        ValueError: when the factors do not make a weight of that shape.

    Example:
        >>> import torch
        >>> LowRank(torch.ones(2, 1), torch.ones(1, 3), (2, 3)).dense()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        rows, columns = matrix_shape(self.shape)
        if self.left.shape != (rows, self.rank) or self.right.shape != (self.rank, columns):
            raise ValueError(
                f"Factors of {tuple(self.left.shape)} and {tuple(self.right.shape)} do not make a weight of "
                f"{tuple(self.shape)}; they must be ({rows}, r) and (r, {columns})."
            )

    @property
    def rank(self) -> int:
        """Number of columns of the left factor, r."""
        return self.right.shape[0]

    @property
    def elements(self) -> int:
        """Number of elements of both factors."""
        return self.left.numel() + self.right.numel()

    @property
    def saves(self) -> bool:
        """Whether the factors have fewer elements than the weight."""
        return self.elements < math.prod(self.shape)

    def dense(self) -> Tensor:
        """Return the weight, the same bit for bit however the factors lie in memory."""
        return as_weight(self.left.contiguous() @ self.right.contiguous(), self.shape)

    def map(self, change: Callable[[Tensor], Tensor]) -> "LowRank":
        """Return the same with both factors changed, for example copied."""
        return LowRank(change(self.left), change(self.right), self.shape)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix of a weight of this shape, see :func:`as_matrix`."""
    window = shape[2:]
    half = (len(window) + 1) // 2
    return shape[0] * math.prod(window[:half]), shape[1] * math.prod(window[half:])


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as a matrix.

    Args:
        weight: (O, I) of a linear layer; (O, I, h, w) of a convolution, or with more or fewer sizes of a window.

    Returns:
        (O, I) as it is; (O h, I w), the row of output o and height a being ``o h + a``, the column of input i and
        width b ``i w + b``. Of a window of one size that is (O k, I), of one of three (O d h, I w).

    Source:
        Idelbayev and Carreira-Perpinan 2020, scheme 2; FedSLR, Section 3.
    """
    half = (weight.dim() - 1) // 2
    return weight.movedim(1, 1 + half).reshape(matrix_shape(tuple(weight.shape)))


def as_weight(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the weight whose matrix :func:`as_matrix` made.

    Args:
        matrix: (rows, columns), as :func:`matrix_shape` has them.
        shape: of the weight, such as (O, I, F, F).
    """
    half = (len(shape) - 1) // 2
    apart = matrix.reshape(shape[0], *shape[2 : 2 + half], shape[1], *shape[2 + half :])
    return apart.movedim(1 + half, 1).contiguous()


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
    """Return the factors, except for their signs, of a matrix with at least as many columns as rows."""
    # Of the smaller square of the two: several times faster than a singular value decomposition, and in double
    # precision exact enough for weights in single precision.
    squares, left = torch.linalg.eigh(matrix @ matrix.T)
    squares, left = squares.flip(0), left.flip(1)[:, :rank]
    none = squares <= squares[0].abs() * len(squares) * torch.finfo(squares.dtype).eps
    values = squares.masked_fill(none, 0)[:rank].sqrt()
    root = values.sqrt()
    return left * root, matrix.T @ left / root.where(values > 0, torch.inf)
