"""Soft thresholds: of entries, and of singular values by three ways that must agree with NumPy's one."""

import numpy as np
import pytest
import torch

from lit_pfl.ops import singular_values, soft_threshold, threshold_singular_values

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape)


def with_values(values, rows, columns):
    """Return a matrix with given singular values."""
    values = np.asarray(values, dtype=float)
    left, right = (np.linalg.qr(normal(size, len(values))).Q for size in (rows, columns))
    return left * values @ right.T


MATRICES = {
    "random": (normal(40, 40), 3.0),
    "tall": (normal(90, 12), 8.0),
    "wide": (normal(7, 80), 8.0),
    "row": (normal(1, 50), 0.5),
    "column": (normal(50, 1), 0.5),
    "number": (normal(1, 1), 0.01),
    "rank 3 of 30": (normal(30, 3) @ normal(3, 30), 1.0),
    "ill-conditioned": (with_values(10.0 ** -np.arange(20), 30, 20), 1e-3),
    "ill-conditioned, tiny threshold": (with_values(10.0 ** -np.arange(20), 30, 20), 1e-9),
    "all values the same": (with_values([2.0] * 20, 20, 25), 0.5),
    "repeated, one of them the threshold": (with_values([3, 3, 3, 1, 1, 1, 0.5, 0.5], 10, 10), 1.0),
    "close to the threshold": (with_values([2, 1 + 1e-4, 1 + 1e-6, 1 - 1e-6, 1 - 1e-4], 9, 9), 1.0),
    "diagonal": (np.diag([5.0, 1.0, 0.0, -4.0]), 1.5),
    "ones": (np.ones((6, 9)), 0.1),
    "all below": (normal(8, 8), 100.0),
    "nothing taken": (normal(12, 9), 0.0),
    "zeros": (np.zeros((5, 4)), 0.1),
    "zeros, nothing taken": (np.zeros((5, 4)), 0.0),
    "huge": (normal(20, 10) * 1e30, 1e30),
    "hardly there": (normal(20, 10) * 1e-30, 1e-30),
    "a layer of a network": (normal(192, 192) * 0.02, 1e-3),
}


def by_numpy(matrix, threshold):
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return u * np.maximum(s - threshold, 0) @ vt


def assert_close(factors, matrix, threshold):
    left, right = (factor.double().numpy() for factor in factors)
    matrix = matrix.astype(np.float64)
    expected = by_numpy(matrix, threshold)
    assert left.shape[1] == right.shape[0]
    assert (left.shape[0], right.shape[1]) == matrix.shape
    assert np.isfinite(left).all()
    assert np.isfinite(right).all()
    assert np.linalg.norm(left @ right - expected) <= 1e-5 * np.linalg.norm(matrix)
    # the square roots of the same singular values on both sides
    largest = np.linalg.norm(matrix, 2)
    if threshold < 1e-4 * largest:  # rounding errors of the largest hide the smallest
        return
    for gram in (left.T @ left, right @ right.T):
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-5 * largest)
    np.testing.assert_allclose((left**2).sum(0), (right**2).sum(1), atol=1e-5 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MATRICES)
def test_it_is_that_of_a_whole_decomposition(kind, dtype):
    matrix, threshold = MATRICES[kind]
    given = torch.tensor(matrix, dtype=dtype)
    [factors] = threshold_singular_values([given], threshold)
    assert factors.left.dtype == factors.right.dtype == dtype
    assert_close(factors, given.numpy(), threshold)
    if dtype == torch.float64:
        s = np.linalg.svd(matrix, compute_uv=False)
        error = np.abs(factors.left.numpy() @ factors.right.numpy() - by_numpy(matrix, threshold)).max()
        assert error <= 1e-12 * s[0]


def test_the_rank_is_the_number_of_values_above_the_threshold():
    [factors] = threshold_singular_values([torch.tensor(with_values([9, 4, 2, 0.9, 0.1], 30, 40)).float()], 1.0)
    assert factors.right.shape == (3, 40)
    np.testing.assert_allclose(factors.left.square().sum(0), [8, 3, 1], rtol=1e-5)
    [nothing] = threshold_singular_values([torch.zeros(3, 4)], 1.0)
    assert (nothing.left.shape, nothing.right.shape) == ((3, 0), (0, 4))
    assert torch.equal(nothing.left @ nothing.right, torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_are_computed_in_longer_ones(dtype):
    matrix = torch.tensor(normal(20, 30), dtype=dtype)
    [factors] = threshold_singular_values([matrix], 2.0)
    assert factors.left.dtype == dtype
    expected = by_numpy(matrix.double().numpy(), 2.0)
    error = (factors.left.double() @ factors.right.double()).numpy() - expected
    assert np.linalg.norm(error) <= 0.01 * np.linalg.norm(expected)


def test_many_at_once_are_those_one_by_one():
    matrices = [torch.tensor(normal(*s)).float() for s in [(20, 30), (9, 9), (20, 30), (0, 4), (30, 20), (20, 30)]]
    together = threshold_singular_values(matrices, 2.0)
    for matrix, factors in zip(matrices, together, strict=True):
        [alone] = threshold_singular_values([matrix], 2.0)
        torch.testing.assert_close(factors.left @ factors.right, alone.left @ alone.right)
    assert threshold_singular_values([], 1.0) == []


def power_law(n, rank, exponent, m=None):
    """Singular values that cross 1 at a rank, without a gap there."""
    return with_values((np.arange(1, n + 1) / rank) ** -exponent, m or n, n)


@pytest.fixture
def decomposed(monkeypatch):
    """Count the matrices that were decomposed as a whole."""
    counts = []
    whole = singular_values._of_all

    def counting(stack, thresholds):
        counts.append(len(stack))
        return whole(stack, thresholds)

    monkeypatch.setattr(singular_values, "_of_all", counting)
    return counts


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(300, 300), (500, 300), (300, 600)])
@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_near_a_known_subspace_it_is_found_without_a_whole_decomposition(decomposed, shape, exponent):
    m, n = shape

    def noise():
        matrix = power_law(min(m, n), 15, exponent, max(m, n))
        return matrix if m >= n else matrix.T

    matrix = noise()
    [before] = threshold_singular_values([torch.tensor(matrix).float()], 1.0)
    assert decomposed == ([1] if m >= n else [1, 1])  # a wide one is turned
    decomposed.clear()
    for _ in range(3):  # rounds, each of which changes all of the matrix a little
        u, _, vt = np.linalg.svd((before.left @ before.right).double().numpy())
        matrix = (before.left @ before.right).double().numpy() + 0.9 * u[:, :12] @ vt[:12] + 0.2 * noise()
        given = torch.tensor(matrix).float()
        [before] = threshold_singular_values([given], 1.0, [before.right])
        assert_close(before, given.numpy(), 1.0)
    assert not decomposed


@pytest.mark.parametrize("start", [0, 3, 10])
def test_a_start_that_misses_something_costs_time_but_nothing_else(start):
    """Orthogonal to what it should span, in particular."""
    matrix = with_values([50, 40, 30, 20, 10, 5, 2, 1.5] + [0.9, 0.5] * 40, 400, 400)
    right = np.linalg.svd(matrix)[2]
    given = torch.tensor(matrix).float()
    for rows in (right[-start:] if start else right[:0], normal(start, 400), right[:start]):
        [factors] = threshold_singular_values([given], 1.0, [torch.tensor(rows).float()])
        assert factors.right.shape[0] == 8
        assert_close(factors, given.numpy(), 1.0)


def test_a_start_may_have_dependent_rows_and_rows_of_zeros(decomposed):
    matrix = with_values([50, 40, 30, 20, 10, 5, 2, 1.5] + [0.3] * 40, 400, 400)
    right = np.linalg.svd(matrix)[2][:8]
    given = torch.tensor(matrix).float()
    for rows in (np.concatenate([right, right]), np.concatenate([right, 0 * right]), right[[0] * 8] + 1e-4 * right):
        [factors] = threshold_singular_values([given], 1.0, [torch.tensor(rows).float()])
        assert_close(factors, given.numpy(), 1.0)
    assert not decomposed


def test_a_few_values_outside_that_are_larger_than_the_others_there_do_not_matter(decomposed):
    for outside in (0.55, 0.65, 0.75):
        matrix = with_values([50, 40, 30, 20, 10, 5, 2, 1.5] + [outside] * 30 + [0.35] * 300, 400, 400)
        start = np.linalg.svd(matrix)[2][:8]
        given = torch.tensor(matrix).float()
        [factors] = threshold_singular_values([given], 1.0, [torch.tensor(start).float()])
        assert_close(factors, given.numpy(), 1.0)
    assert not decomposed


def test_a_start_that_is_much_too_narrow_is_widened(decomposed):
    matrix = with_values([*np.linspace(50, 2, 60), *np.linspace(0.4, 0, 340)], 400, 400)
    right = np.linalg.svd(matrix)[2]
    given = torch.tensor(matrix).float()
    [factors] = threshold_singular_values([given], 1.0, [torch.tensor(right[:5]).float()])
    assert factors.right.shape[0] == 60
    assert_close(factors, given.numpy(), 1.0)
    assert not decomposed


def test_values_thousands_of_times_the_threshold_do_not_hide_those_near_it(decomposed):
    """As trained networks have them: few that are large and grow, the others spread evenly down to nothing."""
    values = np.array([3000.0, 1000, 400, *np.linspace(20, 0.05, 60)])
    u, v = (np.linalg.qr(normal(300, 63)).Q for _ in range(2))
    matrix = u * (values + 0.9 + 0.02 * values) @ v.T + with_values([2, 1.5, *np.linspace(0.5, 0, 298)], 300, 300)
    given = torch.tensor(matrix).float()
    [factors] = threshold_singular_values([given], 1.0, [torch.tensor(v.T).float()])
    assert_close(factors, given.numpy(), 1.0)
    assert not decomposed


@pytest.mark.parametrize("largest", [1.0, 1.0001, 1.001, 1.02, 1.3])
def test_a_value_just_above_the_threshold_is_not_lost(largest):
    """Among hundreds just below it, where the shorter way cannot tell, the longer one is taken."""
    matrix = with_values([30, 20, 10, largest] + [0.97] * 60 + [0.7] * 200, 300, 300)
    right = np.linalg.svd(matrix)[2]
    given = torch.tensor(matrix).float()
    [factors] = threshold_singular_values([given], 1.0, [torch.tensor(right[:3]).float()])
    assert_close(factors, given.numpy(), 1.0)


def test_what_the_probes_say_of_what_is_left():
    """They see the one direction in 400 that reaches the threshold, and do not mind many below it."""
    nothing = torch.zeros(0, 400)
    for largest, expected in [(0.8, True), (0.79, True), (1.0, False), (1.5, False), (100.0, False)]:
        matrix = torch.tensor(with_values([largest] + [0.8] * 300, 400, 400)).float()
        assert singular_values._all_below(matrix, nothing, nothing, 0.8, 1.0) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_has_no_singular_values_is_refused(value):
    matrix = torch.ones(4, 4)
    matrix[1, 2] = value
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        threshold_singular_values([torch.ones(4, 4), matrix], 0.5)
    with pytest.raises(ValueError, match="cannot be shrunk by"):
        threshold_singular_values([torch.ones(4, 4)], value if np.isnan(value) else -value)
    with pytest.raises(ValueError, match=r"Tensor 0 is torch.float32 \(3,\), not a matrix"):
        threshold_singular_values([torch.ones(3)], 0.5)


@pytest.mark.parametrize("near", [[torch.ones(2, 5)], [torch.ones(4)], []])
def test_a_start_that_does_not_fit_is_refused(near):
    with pytest.raises(ValueError, match=r"^near(\[0\] is .* give 4 columns| has 0 entries for 1 matrices)"):
        threshold_singular_values([torch.ones(6, 4)], 0.1, near)


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    matrix = torch.tensor(power_law(200, 5, 2.0)).float()
    threshold_singular_values([matrix], 1.0, [threshold_singular_values([matrix], 1.0)[0].right])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 5.0])
def test_the_soft_threshold_of_entries_is_exact(threshold):
    x = np.concatenate([normal(50), [0.0, -0.0, 0.3, -0.3]])
    expected = np.sign(x) * np.maximum(np.abs(x) - threshold, 0)
    np.testing.assert_array_equal(soft_threshold(torch.tensor(x), threshold).numpy(), expected)
