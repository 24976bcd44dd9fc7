"""How samples are dealt to clients."""

import math

import numpy as np
import pytest

from lit_pfl.data import IID, BalancedDirichlet, ClassShards, ClientDirichlet, Dirichlet
from lit_pfl.data.eval_split import alike_samples, matched_split
from lit_pfl.errors import ConfigError


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


@pytest.mark.parametrize("alpha", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("kind", [Dirichlet, BalancedDirichlet, ClientDirichlet])
def test_a_concentration_is_a_number_above_zero(kind, alpha):
    """NumPy draws no proportions for another, and one client would get everything."""
    with pytest.raises(ConfigError, match=f"data.partition.alpha={alpha}: give a number above 0"):
        kind(alpha)


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


@pytest.mark.parametrize("alpha", [1e-5, 0.01, 0.5, 100.0])
@pytest.mark.parametrize("num_clients", [1, 3, 16])
def test_balanced_dirichlet_is_that_of_fedma(alpha, num_clients):
    """As Wang et al. describe it: nothing more for a client that has its N / K samples."""
    labels = shuffled_labels([200, 31, 90, 150, 64])
    rng = np.random.default_rng(7)
    expected: list[list[int]] = [[] for _ in range(num_clients)]
    for c in range(5):
        members = rng.permutation(np.where(labels == c)[0])
        p = rng.dirichlet([alpha] * num_clients)
        p = [q if len(own) < len(labels) / num_clients else 0 for q, own in zip(p, expected, strict=True)]
        if sum(p) == 0:
            p = [float(len(own) < len(labels) / num_clients) for own in expected]
        cuts = (np.cumsum(np.array(p) / sum(p)) * len(members)).astype(int)[:-1]
        for own, part in zip(expected, np.split(members, cuts), strict=True):
            own += part.tolist()
    clients = deal(BalancedDirichlet(alpha, min_samples=0), labels, num_clients, seed=7)
    assert [sorted(own) for own in expected] == [positions.tolist() for positions in clients]
    filled = deal(BalancedDirichlet(alpha), labels, num_clients, seed=7)
    assert_deals_each_once(filled, len(labels))
    assert min(map(len, filled)) >= 10


def test_balanced_dirichlet_gives_nobody_much_more_than_the_rest():
    labels = shuffled_labels([100] * 50)
    balanced, plain = (deal(kind(0.1, min_samples=0), labels, 10) for kind in (BalancedDirichlet, Dirichlet))
    assert max(map(len, balanced)) <= 500 + 100 < max(map(len, plain))


def test_balanced_dirichlet_has_nothing_more_for_a_client_with_exactly_its_share():
    labels = shuffled_labels([40, 40])
    for seed in range(10):
        dealt = counts(labels, deal(BalancedDirichlet(1e-6, min_samples=0), labels, 2, seed)).tolist()
        assert sorted(dealt) == [[0, 40], [40, 0]]


@pytest.mark.parametrize("exhausted", ["redraw", "reuse"])
@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 1e4])
@pytest.mark.parametrize(("sizes", "num_clients"), [([50] * 10, 20), ([100, 7, 31], 6), ([5, 5], 10), ([9], 2)])
def test_client_dirichlet_gives_everybody_the_same_number(sizes, num_clients, alpha, exhausted):
    labels = shuffled_labels(sizes)
    clients = deal(ClientDirichlet(alpha, exhausted), labels, num_clients)
    assert [len(positions) for positions in clients] == [len(labels) // num_clients] * num_clients
    times = np.bincount(np.concatenate(clients), minlength=len(labels))
    assert len(times) == len(labels)
    if exhausted == "redraw":
        assert times.max() == 1
    for c, size in enumerate(sizes):  # a class is used up before any of its samples is dealt again
        assert np.ptp(times[labels == c]) <= 1, size


def test_client_dirichlet_follows_the_proportions_of_each_client():
    labels = shuffled_labels([4000] * 5)
    proportions = np.random.default_rng(3).dirichlet([0.5] * 5, 4)
    clients = deal(ClientDirichlet(0.5, "reuse"), labels, 4, seed=3)
    shares = counts(labels, clients) / 5000
    assert np.abs(shares - proportions).max() < 4 * 0.5 / 5000**0.5  # four standard deviations of a share of 1/2


def test_client_dirichlet_draws_among_what_is_left():
    """Once the first class is used up, a client that wants nothing else gets others; with reuse it gets its own."""
    labels = np.repeat([0, 1], [10, 90])
    wants = np.random.default_rng(9).dirichlet([0.01] * 2, 2)
    assert (wants.argmax(1) == [0, 1]).all()
    assert wants.max(1).min() > 0.999999
    assert counts(labels, deal(ClientDirichlet(0.01), labels, 2, seed=9)).tolist() == [[10, 40], [0, 50]]
    assert counts(labels, deal(ClientDirichlet(0.01, "reuse"), labels, 2, seed=9)).tolist() == [[50, 0], [0, 50]]


@pytest.mark.parametrize("how", ["in_turn", "mixed"])
@pytest.mark.parametrize(
    ("sizes", "num_clients", "own"),
    [
        ([5000] * 10, 10, 3), ([500] * 100, 10, 50), ([500] * 100, 100, 5), ([30, 41, 77, 12], 6, 2),
        ([20] * 4, 3, 4), ([20] * 4, 4, 1), ([60] * 6, 9, 4), ([17], 5, 1),
    ],
)  # fmt: skip
def test_class_shards_are_equal_and_of_as_many_classes_as_asked_for(sizes, num_clients, own, how):
    labels = shuffled_labels(sizes)
    clients = deal(ClassShards(own, how), labels, num_clients)
    assert_deals_each_once(clients, len(labels), all_used=False)
    dealt = counts(labels, clients)
    assert ((dealt > 0).sum(1) == own).all()
    shards = num_clients * own // len(sizes)
    assert ((dealt > 0).sum(0) == shards).all()
    for c, size in enumerate(sizes):
        assert set(dealt[:, c]) <= {0, size // shards}


def test_class_shards_of_the_paper_s_sizes():
    """10 clients with 3 of CIFAR-10's classes: 3 shards of 1,666; 10 with 50 of CIFAR-100's: 5 of 100."""
    cifar10, cifar100 = shuffled_labels([5000] * 10), shuffled_labels([500] * 100)
    assert {len(positions) for positions in deal(ClassShards(3), cifar10, 10)} == {3 * 1666}
    assert {len(positions) for positions in deal(ClassShards(50), cifar100, 10)} == {50 * 100}


def test_class_shards_deal_the_classes_in_turn():
    labels = shuffled_labels([30] * 6)
    sets = [set(np.flatnonzero(row)) for row in counts(labels, deal(ClassShards(4), labels, 9))]
    assert sets[:3] == sets[3:6] == sets[6:]  # 3 x 4 is twice round
    assert sets[0] | sets[1] == set(range(6))
    others = [set(np.flatnonzero(row)) for row in counts(labels, deal(ClassShards(4), labels, 9, seed=1))]
    assert sets != others


def test_mixed_class_shards_are_of_many_sets_of_classes():
    """10 clients with 5 of 10 classes: in turn there are two sets, which nobody has classes of both of."""
    labels = shuffled_labels([30] * 10)
    sets = {
        how: {tuple(np.flatnonzero(row)) for row in counts(labels, deal(ClassShards(5, how), labels, 10))}
        for how in ("in_turn", "mixed")
    }
    assert len(sets["in_turn"]) == 2
    assert len(sets["mixed"]) >= 8
    reached = set(next(iter(sets["mixed"])))
    for _ in range(3):
        reached |= {c for own in sets["mixed"] if reached & set(own) for c in own}
    assert reached == set(range(10))


@pytest.mark.parametrize(
    ("num_clients", "own", "classes", "fitting", "multiple"),
    [
        (7, 2, 10, [10], 5),
        (10, 11, 10, list(range(1, 11)), None),
        (4, 3, 10, [5, 10], 10),
        (15, 3, 10, [2, 4, 6, 8, 10], 10),
    ],
)
def test_shards_that_do_not_come_out_are_refused_with_numbers_that_do(num_clients, own, classes, fitting, multiple):
    labels = shuffled_labels([200] * classes)
    with pytest.raises(ConfigError, match=rf"data\.partition\.classes_per_client={own} ") as error:
        deal(ClassShards(own), labels, num_clients)
    assert f"give {', '.join(map(str, fitting))}" in str(error.value)
    for c in range(1, classes + 1):
        assert (c in fitting) == (num_clients * c % classes == 0)
    for c in fitting:
        deal(ClassShards(c), labels, num_clients)
    if multiple is None:
        assert "multiple" not in str(error.value)
    else:
        assert str(error.value).endswith(f"a multiple of {multiple}.")
        deal(ClassShards(own), labels, multiple)


def test_shards_without_samples_are_refused():
    labels = shuffled_labels([40, 3])
    with pytest.raises(ConfigError, match=r"data\.num_clients=4 .*classes_per_client=2 .* 4 shards, .* 3 training"):
        deal(ClassShards(2), labels, 4)
    assert (counts(labels, deal(ClassShards(2), labels, 3)) == [13, 1]).all()


@pytest.mark.parametrize(
    "partition",
    [
        IID(), Dirichlet(0.5), Dirichlet(0.2, min_samples=50), BalancedDirichlet(0.5), ClientDirichlet(0.5),
        ClientDirichlet(0.5, "reuse"), ClassShards(5),
    ],
)  # fmt: skip
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


def test_samples_alike_have_the_clients_own_shares_of_classes():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 2000)
    counts = np.array([[29, 71, 0, 0], [10, 20, 30, 40], [0, 0, 0, 7], [333, 333, 334, 0]])
    drawn = alike_samples(labels, counts, 100, np.random.default_rng(1))
    for own, positions in zip(counts, drawn, strict=True):
        assert len(np.unique(positions)) == len(positions)
        expected = [100 * n // own.sum() for n in own]
        np.testing.assert_array_equal(np.bincount(labels[positions], minlength=4), expected)
    assert np.intersect1d(drawn[0], drawn[1]).size > 0  # of 2,000 samples, clients may have the same ones
    again = alike_samples(labels, counts, 100, np.random.default_rng(1))
    for one, other in zip(drawn, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_samples_alike_are_all_there_are_of_a_rare_class():
    labels = np.array([0] * 5 + [1] * 500)
    [drawn] = alike_samples(labels, np.array([[1, 1]]), 100, np.random.default_rng(0))
    np.testing.assert_array_equal(np.bincount(labels[drawn]), [5, 50])
    [nothing] = alike_samples(np.empty(0, np.int64), np.array([[1, 1]]), 100, np.random.default_rng(0))
    assert len(nothing) == 0


def test_so_few_samples_alike_that_a_client_gets_none_are_refused():
    labels, counts = np.arange(100) % 10, np.array([[50] * 10, [0] * 10])
    message = r"^data\.eval_samples=9: client 0 has 10 classes, and rounded down it gets no sample of any; give more"
    with pytest.raises(ConfigError, match=message):
        alike_samples(labels, counts, 9, np.random.default_rng(0))
    assert [len(own) for own in alike_samples(labels, counts, 10, np.random.default_rng(0))] == [10, 0]


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.1)])
def test_ten_thousand_clients_get_five_samples_each(partition):
    """It takes a fifth of a second; where all clients are looked through for each, 5 to 10 seconds."""
    assert {len(part) for part in deal(partition, shuffled_labels([5000] * 10), 10_000)} == {5}
