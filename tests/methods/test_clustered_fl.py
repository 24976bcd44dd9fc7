"""Clustered federated learning: when clusters split, into whom, and what each part is sent."""

import itertools

import numpy as np
import pytest
import torch
from quadratic import equal, softmax_regression

from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import Digits
from lit_pfl.errors import ConfigError
from lit_pfl.methods import ClusteredFL, FedAvg
from lit_pfl.methods.similarity.clustered_fl import ClusteredFLServer, SplitRule
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops import bipartition
from tiny import assert_equal, client, digits, run, weights


class TwoGroups(Digits):
    """Digits of which every other client counts the classes backwards."""

    def client(self, client):
        data = super().client(client)
        if client % 2:
            for part in (data.train, data.val, data.test):
                part.label_map = torch.arange(9, -1, -1)
        return data


def two_groups(num_clients: int = 6) -> TwoGroups:
    return TwoGroups(num_clients=num_clients, image_size=8, batch_size=32)


#: thresholds that suit softmax regression on them: one split, after round 3
SUITABLE = {"eps1": 0.45, "eps2": 0.65, "start_round": 2, "thresholds": "relative"}


# ------------------------------------------------------------------------------------------------------- bipartitions


def merged(similarity: np.ndarray, linkage: str) -> set[frozenset[int]]:
    """Merge the most similar groups until two are left."""
    between = {"complete": np.min, "single": np.max}[linkage]
    groups = [frozenset({i}) for i in range(len(similarity))]
    while len(groups) > 2:
        a, b = max(itertools.combinations(groups, 2), key=lambda p: between(similarity[np.ix_([*p[0]], [*p[1]])]))
        groups = [group for group in groups if group not in (a, b)] + [a | b]
    return set(groups)


def cosines(num_clients: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(num_clients, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


@pytest.mark.parametrize("linkage", ["complete", "single"])
@pytest.mark.parametrize("num_clients", [2, 3, 9])
def test_bipartitions_are_those_of_agglomerative_clustering(linkage, num_clients):
    for seed in range(20):
        similarity = cosines(num_clients, seed)
        second = bipartition(torch.from_numpy(similarity), linkage)
        assert not second[0]
        groups = {frozenset(np.flatnonzero(second == side).tolist()) for side in (False, True)}
        assert groups == merged(similarity, linkage)


def test_single_linkage_minimises_the_largest_similarity_across():
    similarity = cosines(7, seed=1)

    def across(second: np.ndarray) -> float:
        return similarity[np.ix_(second, ~second)].max()

    cuts = [np.array([False, *sides]) for sides in itertools.product([False, True], repeat=6) if any(sides)]
    best = bipartition(torch.from_numpy(similarity), "single").numpy()
    assert across(best) == min(across(cut) for cut in cuts)


# -------------------------------------------------------------------------------------------------------- the server


class Reference:
    """The authors' loop in NumPy: every client has its cluster's model W_i, and is given the mean update."""

    def __init__(self, start: np.ndarray, num_clients: int, eps1: float, eps2: float, start_round: int) -> None:
        self.w = np.tile(start, (num_clients, 1))
        self.clusters = [list(range(num_clients))]
        self.eps1, self.eps2, self.start_round = eps1, eps2, start_round

    def step(self, round: int, trained: np.ndarray) -> None:
        update = trained - self.w
        unit = update / np.linalg.norm(update, axis=1, keepdims=True)
        new = []
        for cluster in self.clusters:
            mean, largest = np.linalg.norm(update[cluster].mean(0)), np.linalg.norm(update[cluster], axis=1).max()
            if mean < self.eps1 and largest > self.eps2 and len(cluster) > 2 and round > self.start_round:
                parts = merged((unit @ unit.T)[np.ix_(cluster, cluster)], "complete")
                new += [[cluster[i] for i in sorted(part)] for part in parts]
            else:
                new.append(cluster)
        self.clusters = sorted(new)
        for cluster in self.clusters:
            self.w[cluster] = self.w[cluster] + update[cluster].mean(0)


def server(num_clients: int, start: np.ndarray, names=("w",), **rule) -> ClusteredFLServer:
    made = ClusteredFLServer(
        SplitRule(**{"eps1": 0.4, "eps2": 1.6, "min_size": 3, "start_round": 20} | {"relative": False} | rule,
                  linkage="complete"), names,
    )  # fmt: skip
    made.start({k: ClientInfo(k + 1, payload(start)) for k in range(num_clients)})
    return made


def payload(w: np.ndarray) -> Payload:
    return Payload({"w": torch.from_numpy(np.asarray(w, dtype=np.float64))})


def test_rounds_equal_the_authors_loop():
    """Eight clients are drawn to four places; the clusters split and split again."""
    rng, dim = np.random.default_rng(0), 5
    goal = np.repeat(3 * rng.normal(size=(4, dim)), 2, axis=0)
    start = rng.normal(size=dim)
    made, reference = server(8, start, eps1=1.2, start_round=2), Reference(start, 8, 1.2, 1.6, start_round=2)
    seen = []
    for round in range(1, 12):
        sent = np.stack([made.reply(k)["w"].numpy() for k in range(8)])
        np.testing.assert_allclose(sent, reference.w, rtol=1e-12)
        trained = sent + 0.5 * (goal - sent) + 0.02 * rng.normal(size=sent.shape)
        made.aggregate(round, {k: payload(trained[k]) for k in range(8)})
        reference.step(round, trained)
        assert sorted(made.clusters) == reference.clusters
        seen.append(len(made.clusters))
    assert seen[:2] == [1, 1]  # not before the start round
    assert seen[-1] == 4
    assert sorted(made.clusters) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(made.models) == 4 + 1  # and of the clusters that were split the first alone is kept, for later clients
    assert not made.forks


OPPOSED = np.array([[2.0, 0.1], [2.1, 0.0], [-2.0, 0.0], [-2.05, 0.1]])


@pytest.mark.parametrize(
    ("rule", "splits"),
    [
        ({}, True),
        ({"eps1": 0.03}, False),  # the mean update, 0.05, is not small
        ({"eps2": 2.2}, False),  # no client's own update is large
        ({"start_round": 21}, False),
        ({"min_size": 4}, True),
        ({"min_size": 5}, False),
        ({"relative": True, "eps2": 0.9}, True),  # as round 1's largest is 2.1
        ({"relative": True, "eps1": 0.02, "eps2": 0.9}, False),
    ],
)
def test_every_condition_of_a_split_counts(rule, splits):
    made = server(4, np.zeros(2), **rule)
    made.aggregate(1, {k: payload(OPPOSED[k]) for k in range(4)})
    np.testing.assert_allclose(made.reply(0)["w"], OPPOSED.mean(0))
    moved = OPPOSED + OPPOSED.mean(0)
    made.aggregate(21, {k: payload(moved[k]) for k in range(4)})
    assert made.clusters == ([[0, 1], [2, 3]] if splits else [[0, 1, 2, 3]])
    for cluster in made.clusters:  # the split comes before the mean, which counts all alike
        for k in cluster:
            np.testing.assert_allclose(made.reply(k)["w"], moved[cluster].mean(0))


def test_only_trained_weights_are_compared():
    """Running statistics and counters that travel too are averaged, and say nothing about who is alike."""

    def upload(k: int, sign: float) -> Payload:
        odd = k % 2
        return Payload(
            {"w": torch.tensor([sign, 0.1 * k]), "var": torch.tensor([1e6 * odd]), "n": torch.tensor(7 + odd)}
        )

    made = ClusteredFLServer(SplitRule(0.4, 0.9, 3, 0, False, "complete"), ["w"])
    made.start({k: ClientInfo(1, Payload({"w": torch.zeros(2), "var": torch.ones(1), "n": torch.tensor(0)}))
                for k in range(4)})  # fmt: skip
    made.aggregate(1, {k: upload(k, 1.0 if k < 2 else -1.0) for k in range(4)})
    assert made.clusters == [[0, 1], [2, 3]]
    assert made.reply(0)["var"].item() == 5e5
    assert made.reply(0)["n"].dtype == torch.int64


def test_those_who_were_away_follow_their_own_kind():
    """Client 4 is of the first kind, client 5 of the second; neither trains in the round of the split."""
    made = server(6, np.zeros(2), start_round=0)
    made.aggregate(1, {k: payload(OPPOSED[k]) for k in range(4)})
    assert made.clusters == [[4, 5], [0, 1], [2, 3]]
    np.testing.assert_array_equal(made.reply(4)["w"], [0, 0])  # the model from before the split
    np.testing.assert_allclose(made.reply(0)["w"], OPPOSED[:2].mean(0))

    made.aggregate(2, {4: payload([2.5, 0.3]), 0: payload([2.2, 0.2])})
    assert made.clusters == [[5], [0, 1, 4], [2, 3]]
    np.testing.assert_allclose(made.reply(4)["w"], [2.2, 0.2])  # client 4's update was of an old model
    assert len(made.forks) == 1

    made.aggregate(3, {5: payload([-0.1, 0.0])})
    assert made.clusters == [[0, 1, 4], [2, 3, 5]]
    np.testing.assert_allclose(made.reply(5)["w"], OPPOSED[2:].mean(0))
    assert not made.forks
    assert len(made.models) == 2 + 1


def test_those_who_were_away_for_two_splits_find_their_way():
    made = server(7, np.zeros(2), start_round=0, eps1=0.6, eps2=0.9)
    kinds = np.array([[3.0, 1.0], [3.0, 1.1], [3.0, -1.0], [3.0, -1.1], [-5.8, 0.0], [-5.9, 0.0], [3.0, -1.05]])
    made.aggregate(1, {k: payload(kinds[k]) for k in range(6)})
    assert made.clusters == [[6], [0, 1, 2, 3], [4, 5]]
    middle = made.reply(0)["w"].numpy()
    made.aggregate(2, {k: payload(middle + [0.0, kinds[k][1]]) for k in range(4)})
    assert made.clusters == [[6], [4, 5], [0, 1], [2, 3]]
    for _ in range(2):  # at either fork
        made.aggregate(3, {6: payload(made.reply(6)["w"].numpy() + (kinds[6] - made.reply(6)["w"].numpy()))})
    assert made.clusters == [[4, 5], [0, 1], [2, 3, 6]]
    assert len(made.models) == 3 + 1
    assert not made.forks


def test_a_state_can_be_saved_at_a_fork():
    made, other = (server(6, np.zeros(2), start_round=0) for _ in range(2))
    made.aggregate(1, {k: payload(OPPOSED[k]) for k in range(4)})
    other.load_state_dict(made.state_dict())
    for one in (made, other):
        one.aggregate(2, {4: payload([2.5, 0.3]), 0: payload([2.2, 0.2])})
    assert_equal(made.state_dict(), other.state_dict())
    assert other.clusters == [[5], [0, 1, 4], [2, 3]]


# --------------------------------------------------------------------------------------------------------- federations


@pytest.mark.parametrize("options", [{}, {"start_round": 0, "eps1": 0.0}], ids=["in 3 rounds", "no update is so small"])
def test_never_split_it_is_fedavg_bit_for_bit(options):
    clustered, averaged = (run(made, equal(), rounds=3) for made in (client(ClusteredFL, **options), client(FedAvg)))
    assert_equal(weights(clustered), weights(averaged))
    assert_equal(dict(clustered.coordinator.server.reply(1)), dict(averaged.coordinator.server.reply(1)))
    assert clustered.rows == averaged.rows
    assert clustered.traffic.total == averaged.traffic.total


@pytest.mark.seconds
def test_two_kinds_of_clients_are_told_apart_and_served_better():
    clustered = run(softmax_regression(ClusteredFL, **SUITABLE), two_groups(), rounds=6)
    assert clustered.coordinator.server.clusters == [[0, 2, 4], [1, 3, 5]]
    averaged = run(softmax_regression(FedAvg), two_groups(), rounds=6)
    accuracy = [sum(row.scores["acc"] for row in federation.rows) / 6 for federation in (clustered, averaged)]
    assert accuracy[0] > accuracy[1] + 0.04
    assert "backbone.head.weight" in clustered.coordinator.server.reply(0)


@pytest.mark.seconds
def test_two_kinds_are_told_apart_with_some_away():
    federation = run(softmax_regression(ClusteredFL, **SUITABLE), two_groups(10), rounds=12, participation=0.7)
    assert sorted(federation.coordinator.server.clusters) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("options", [{}, {"norm_stats": "averaged"}, {"factorization": Factorization(threshold=1e-3)}])
def test_heads_are_kept_local_where_labels_differ(options):
    made = client(ClusteredFL, start_round=0, eps1=9.0, eps2=0.01, **options)
    federation = run(made, digits(4, permute_labels=True), rounds=2)
    server = federation.coordinator.server
    assert len(server.clusters) > 1
    assert set(server.names) <= set(server.reply(0))
    assert not any("head" in name for name in server.reply(0))
    assert not any("running" in name or "batches" in name for name in server.names)
    heads = list(weights(federation).values())
    for name in [name for name in heads[0] if "head" in name]:
        assert not torch.equal(heads[0][name], heads[1][name])


def test_errors():
    with pytest.raises(ConfigError, match=r"model\.eps2=1\.6: with model\.thresholds=relative"):
        ClusteredFL(thresholds="relative")
