"""Low-rank factors against NumPy's singular value decomposition."""

import numpy as np
import pytest
import torch

from lit_pfl.ops import low_rank_factors

SHAPES = [(5, 9), (9, 5), (6, 6), (1, 7), (7, 1), (1, 1)]


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))


@pytest.mark.parametrize("rank", [1, 2, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_best_approximation_evenly_divided(shape, rank):
    a = matrix(*shape)
    u, v = low_rank_factors(a, rank)
    left, values, right = np.linalg.svd(a.double().numpy(), full_matrices=False)
    k = min(rank, *shape)
    assert u.shape == (shape[0], k)
    assert v.shape == (shape[1], k)
    np.testing.assert_allclose(u @ v.T, (left[:, :k] * values[:k]) @ right[:k], atol=1e-7)
    for factor in (u, v):
        np.testing.assert_allclose(factor.T @ factor, np.diag(values[:k]), atol=1e-7)
    assert all(column[column.abs().argmax()] > 0 for column in u.T)


def test_columns_beyond_the_matrixs_own_rank_are_zero():
    a = matrix(6, 2) @ matrix(2, 8)
    u, v = low_rank_factors(a, 4)
    torch.testing.assert_close(u @ v.T, a.double())
    assert (u[:, :2].abs().amax(0) > 0.1).all()
    assert not u[:, 2:].any()
    assert not v[:, 2:].any()
    assert not low_rank_factors(torch.zeros(3, 4), 2)[0].any()
