"""Robust means against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from lit_pfl.ops.robust import (
    SERIAL,
    alie_deviation,
    clipping_factor,
    coordinate_median,
    geometric_median_weights,
    inner_product,
    krum_scores,
    row_distances,
    trimmed_mean,
    trust_scores,
)


def points(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_medians_are_numpy_s(count):
    x = points(count, 12).view(count, 3, 4)
    np.testing.assert_allclose(coordinate_median(x).numpy(), np.median(x.numpy(), axis=0), rtol=1e-14)


@pytest.mark.parametrize("count", [1, 3, 10, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.29, 0.3, 0.49])
def test_trimmed_means_are_scipy_s(count, share):
    x = points(count, 12)
    cut = round(share * 100) * count // 100  # SciPy cuts 28 of 100 at 0.29, for 0.29 * 100 is a little less than 29
    expected = np.sort(x.numpy(), axis=0)[cut : count - cut].mean(0)
    np.testing.assert_allclose(trimmed_mean(x, share).numpy(), expected, rtol=1e-12, atol=1e-14)
    if (share, count) != (0.29, 100):
        np.testing.assert_allclose(expected, stats.trim_mean(x.numpy(), share, axis=0), atol=1e-14)


def test_distances_do_not_depend_on_threads():
    x, threads = points(5, 100_003), torch.get_num_threads()
    expected = ((x.numpy()[:, None] - x.numpy()[None]) ** 2).sum(-1)
    got = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            got.append((row_distances(x), inner_product(x[0], x[1])))
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_allclose(got[0][0].numpy(), expected, rtol=1e-12)
    assert all(torch.equal(distances, got[0][0]) and product == got[0][1] for distances, product in got)
    assert got[0][1] == pytest.approx(float(x[0].numpy() @ x[1].numpy()), rel=1e-10)


def test_inner_products_of_nothing_and_of_parts():
    assert inner_product(torch.zeros(0), torch.zeros(0)) == 0
    ones = torch.ones(SERIAL + 5, dtype=torch.bfloat16)
    assert inner_product(ones, 2 * ones) == 2 * (SERIAL + 5)


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("weights", [[1 / 7] * 7, [0.3, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1]])
def test_the_geometric_median_is_where_scipy_finds_it(weights):
    x, w = points(7, 3, seed=4), torch.tensor(weights, dtype=torch.float64)
    p = geometric_median_weights([x[:, :2], x[:, 2:]], w, iterations=2000, smoothing=1e-9)
    found = optimize.minimize(
        lambda v: float((w.numpy() * np.linalg.norm(x.numpy() - v, axis=1)).sum()), np.zeros(3), tol=1e-12
    )
    np.testing.assert_allclose((p @ x).numpy(), found.x, atol=1e-5)
    assert p.sum() == pytest.approx(1)


def test_points_that_are_all_equal_keep_their_weights():
    p = geometric_median_weights([torch.ones(3, 4)], torch.tensor([0.5, 0.25, 0.25]), 3, 1e-6)
    assert p.tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("byzantine", [0, 1, 3])
def test_krum_scores_are_sums_over_the_nearest(byzantine):
    x = points(9, 5, seed=2).numpy()
    expected = []
    for i in range(9):
        others = sorted(((x[i] - x[j]) ** 2).sum() for j in range(9) if j != i)
        expected.append(sum(others[: 9 - byzantine - 2]))
    scores = krum_scores(row_distances(torch.from_numpy(x)), byzantine)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="need 11 clients"):
        krum_scores(row_distances(torch.from_numpy(x)), 4)


def test_clipping_leaves_short_ones_as_they_are():
    assert [clipping_factor(norm, 2.0) for norm in (0.0, 1.0, 2.0, 8.0)] == [1, 1, 1, 0.25]
    assert 1 - 1e-7 < clipping_factor(1 + 3e-8, 1.0) < 1  # in double precision


def test_trust_is_the_positive_part_of_the_cosine():
    x, reference = points(6, 8, seed=3), points(1, 8, seed=5)[0]
    x[4] = 0
    scores, factors = trust_scores(x @ reference, x.norm(dim=1), float(reference.norm()))
    for i in range(6):
        length = np.linalg.norm(x[i])
        cosine = float(x[i] @ reference) / length / np.linalg.norm(reference) if length else 0
        assert scores[i] == pytest.approx(max(0, cosine))
        assert factors[i] == (pytest.approx(np.linalg.norm(reference) / length) if length else 0)
    assert not trust_scores(torch.zeros(2), torch.ones(2), 0.0)[0].any()


@pytest.mark.parametrize(("clients", "attackers", "share"), [(50, 24, 24 / 26), (10, 3, 4 / 7), (51, 12, 25 / 39)])
def test_alie_s_deviation(clients, attackers, share):
    """With 50 clients and 24 attackers, two honest ones are to be farther away, as in the paper's example."""
    assert alie_deviation(clients, attackers) == pytest.approx(stats.norm.ppf(share))


def test_alie_among_few():
    assert alie_deviation(3, 3) == 0
    assert alie_deviation(1, 0) == alie_deviation(2, 0) == alie_deviation(2, 1) == 0
    assert alie_deviation(10, 1) == 0  # too few to hide among
    assert alie_deviation(3, 2) == 0  # attackers that are the majority need no honest one
