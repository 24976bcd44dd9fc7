"""FedAMP and HeurFedAMP against their formulas."""

import numpy as np
import pytest
import torch
from quadratic import Quadratics, equal, flat, quadratic

from lit_pfl.core.payload import Payload
from lit_pfl.methods import FedAMP, HeurFedAMP
from lit_pfl.methods.similarity.fedamp import FedAMPServer, HeurFedAMPServer
from lit_pfl.ops import cosines, squared_distances
from tiny import client, run, weights


def payloads(points):
    return {k: Payload({"a": torch.tensor(p[:1]), "b": torch.tensor(p[1:])}) for k, p in enumerate(points)}


POINTS = np.random.default_rng(0).normal(size=(4, 3))


def test_distances_and_cosines_equal_numpy():
    models, lengths = list(payloads(POINTS).values()), np.linalg.norm(POINTS, axis=1)
    expected = ((POINTS[:, None] - POINTS) ** 2).sum(2)
    np.testing.assert_allclose(squared_distances(models, ["a", "b"]), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cosines(models, ["a", "b"]), POINTS @ POINTS.T / np.outer(lengths, lengths), rtol=1e-12)
    zero = [Payload({"a": torch.zeros(2)}), Payload({"a": torch.ones(2)})]
    assert torch.equal(cosines(zero, ["a"]), torch.eye(2, dtype=torch.float64))


def test_two_clients():
    matrix = FedAMPServer(frozenset("ab"), alpha=0.3, sigma=2.0).mixing_matrix(1, payloads(POINTS[:2]))
    other = 0.3 / 2 * np.exp(-((POINTS[0] - POINTS[1]) ** 2).sum() / 2)
    np.testing.assert_allclose(matrix, [[1 - other, other], [other, 1 - other]], rtol=1e-12)


def test_rows_sum_to_one_and_no_weight_is_below_zero_however_large_the_step():
    matrix = FedAMPServer(frozenset("ab"), alpha=50.0, sigma=5.0).mixing_matrix(1, payloads(POINTS))
    np.testing.assert_allclose(matrix.sum(1), np.ones(4), rtol=1e-12)
    assert matrix.min() >= 0
    assert matrix.diagonal().max() < 1e-12


@pytest.mark.parametrize("sigma", [0.0, 3.0])
def test_heuristic_weights(sigma):
    matrix = HeurFedAMPServer(frozenset("ab"), 0.25, sigma).mixing_matrix(1, payloads(POINTS))
    lengths = np.linalg.norm(POINTS, axis=1)
    e = np.exp(sigma * (POINTS @ POINTS.T / np.outer(lengths, lengths)))
    np.fill_diagonal(e, 0)
    np.testing.assert_allclose(matrix, 0.75 * e / e.sum(1, keepdims=True) + 0.25 * np.eye(4), rtol=1e-12)
    alone = HeurFedAMPServer(frozenset("ab"), 0.25, sigma).mixing_matrix(1, payloads(POINTS[:1]))
    assert torch.equal(alone, torch.eye(1, dtype=torch.float64))


@pytest.mark.parametrize("start", ["own", "mixture"])
def test_rounds_equal_the_formula(start):
    problem = Quadratics.random()
    method = quadratic(FedAMP, problem, lam=0.4, alpha=0.5, sigma=4.0, start=start)
    federation = run(method, equal(4), rounds=4, local_epochs=3)
    points = mixtures = np.stack([problem.start] * 4)
    for _ in range(4):
        x = (points if start == "own" else mixtures).copy()
        for k in range(4):
            for _ in range(3):
                x[k] = x[k] - 0.1 * (problem.gradient(k, x[k]) + 0.4 / 0.5 * (x[k] - mixtures[k]))
        points = x
        xi = 0.5 / 4 * np.exp(-((points[:, None] - points) ** 2).sum(2) / 4)
        np.fill_diagonal(xi, 0)
        mixtures = (xi + np.diag(1 - xi.sum(1))) @ points
    for k, member in federation.clients.items():
        np.testing.assert_allclose(flat(member.learner.state_dict()), points[k], rtol=1e-9)
        np.testing.assert_allclose(flat(federation.coordinator.server.reply(k)), mixtures[k], rtol=1e-9)


@pytest.mark.seconds
def test_heurfedamp_s_rounds_begin_at_the_mixture_if_asked_to():
    own, mixture = (weights(run(client(HeurFedAMP, lam=0.0, start=start)))[0] for start in ("own", "mixture"))
    assert not torch.equal(own["backbone.head.weight"], mixture["backbone.head.weight"])
