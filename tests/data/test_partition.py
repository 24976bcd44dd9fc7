"""How samples are dealt to clients."""

import numpy as np
import pytest

from lit_pfl.data import IID, Dirichlet
from lit_pfl.data.partition import matched_split


def shuffled_labels(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(5).permutation(np.repeat(np.arange(len(sizes)), sizes))


def deal(partition, labels, num_clients, seed=0):
    return partition.split(labels, num_clients, np.random.default_rng(seed))


def counts(labels: np.ndarray, clients: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(labels[positions], minlength=labels.max() + 1) for positions in clients])


def assert_deals_each_once(clients: list[np.ndarray], n: int, all_used: bool = True) -> None:
    dealt = np.concatenate(clients)
    assert len(np.unique(dealt)) == len(dealt)
    assert len(dealt) == n or not all_used
    assert dealt.min() >= 0
    assert dealt.max() < n


@pytest.mark.parametrize(
    ("sizes", "num_clients"),
    [([60, 60, 60], 20), ([100, 100], 3), ([64, 7, 31], 3), ([5, 5, 5, 5], 5), ([9, 4], 1), ([4800] * 10, 20)],
)
def test_iid_gives_everybody_the_same_number_of_every_class(sizes, num_clients):
    labels = shuffled_labels(sizes)
    clients = deal(IID(), labels, num_clients)
    assert_deals_each_once(clients, len(labels), all_used=False)
    assert (counts(labels, clients) == [size // num_clients for size in sizes]).all()


def test_iid_deals_a_class_by_round_as_the_papers_do():
    """79 / 20 is 3.95: everybody gets 4 but the last one, who gets what is left."""
    labels = shuffled_labels([79, 81])
    clients = deal(IID(), labels, 20)
    assert_deals_each_once(clients, 160, all_used=False)
    assert counts(labels, clients)[:-1].tolist() == [[4, 4]] * 19
    assert counts(labels, clients)[-1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("sizes", "num_clients"), [([3] * 4, 8), ([3] * 4, 12), ([1] * 10, 10), ([40, 1], 41), ([100, 2], 7)]
)
def test_iid_leaves_nobody_empty_where_a_class_is_too_small_to_share(sizes, num_clients):
    labels = shuffled_labels(sizes)
    clients = deal(IID(), labels, num_clients)
    assert_deals_each_once(clients, len(labels))
    lengths = [len(positions) for positions in clients]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("min_samples", [0, 1, 10, 10_000])
@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5, 1.0, 100.0, 1e5])
def test_dirichlet_always_ends_and_uses_everything_once(alpha, min_samples):
    for n, classes in [(1, 1), (7, 3), (50, 10), (201, 4)]:
        labels = np.random.default_rng(n).integers(0, classes, n)
        for num_clients in {1, max(n // 3, 1), max(n - 1, 1), n}:
            clients = deal(Dirichlet(alpha, min_samples), labels, num_clients)
            assert len(clients) == num_clients
            assert_deals_each_once(clients, n)
            assert min(map(len, clients)) >= min(min_samples, n // num_clients)


def test_dirichlet_may_leave_clients_empty_only_with_min_samples_zero():
    labels = shuffled_labels([50] * 4)
    assert min(map(len, deal(Dirichlet(0.001, min_samples=0), labels, 20))) == 0
    assert min(map(len, deal(Dirichlet(0.001, min_samples=10), labels, 20))) == 10
    assert min(map(len, deal(Dirichlet(0.001), labels, 5))) >= 10


def test_dirichlet_repeats_with_the_seed_of_its_generator():
    labels = shuffled_labels([50] * 4)
    first, again, other = (deal(Dirichlet(), labels, 6, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_smaller_alpha_the_more_a_class_gathers_at_few_clients():
    labels = shuffled_labels([200] * 10)

    def largest_share(alpha: float) -> float:
        return (counts(labels, deal(Dirichlet(alpha, min_samples=0), labels, 10)) / 200).max(axis=0).mean()

    shares = [largest_share(alpha) for alpha in (0.01, 0.5, 10.0, 1e5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.11


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.5), Dirichlet(0.2, min_samples=50)])
def test_evaluation_shares_match_the_training_shares(partition):
    labels, evaluation = shuffled_labels([400] * 5), shuffled_labels([40, 31, 50, 22, 1])
    trained = counts(labels, deal(partition, labels, 7)).astype(float)
    clients = matched_split(evaluation, trained)
    assert_deals_each_once(clients, len(evaluation), all_used=False)
    exact = trained / trained.sum(0) * np.bincount(evaluation)
    assert (np.abs(counts(evaluation, clients) - exact) <= 1).all()
    assert set(np.concatenate(clients)) == set(range(len(evaluation)))


def test_evaluation_of_equal_clients_is_equal():
    evaluation = shuffled_labels([12, 24])
    assert (counts(evaluation, matched_split(evaluation, np.full((6, 2), 10.0))) == [2, 4]).all()


def test_a_client_that_would_get_nothing_to_evaluate_on_gets_one_of_its_commonest_class():
    evaluation = np.array([0, 0, 1, 1, 1, 2])
    trained = np.array([[1000, 1000, 9], [1, 3, 0], [2, 1, 0], [0, 0, 0]], dtype=float)
    clients = matched_split(evaluation, trained)
    assert set(np.concatenate(clients)) == set(range(6))
    assert [evaluation[positions].tolist() for positions in clients[1:]] == [[1], [0], []]


def test_the_commonest_class_to_evaluate_on_is_one_that_is_there():
    clients = matched_split(np.array([0, 1]), np.array([[90.0, 90.0, 5.0], [2.0, 1.0, 40.0]]))
    assert clients[1].tolist() == [0]


def test_equal_shares_leave_nobody_empty_or_far_behind():
    """When round(m / K) rounds up, the last clients find little; from then on samples are dealt one by one."""
    labels = np.arange(1438) % 10
    for num_clients in [*range(1, 200), 700, 1438]:
        sizes = [len(share) for share in IID().split(labels, num_clients, np.random.default_rng(0))]
        assert min(sizes) >= 1, num_clients
        assert min(sizes) >= 0.8 * max(sizes) or max(sizes) - min(sizes) == 1, num_clients
