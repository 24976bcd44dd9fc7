"""APPLE against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed
from quadratic import Quadratics, flat, quadratic, unequal

from lit_pfl.methods import APPLE, StandAlone
from lit_pfl.methods.similarity.apple import APPLEServer, prior_strength
from tiny import assert_equal, client, run, weights


@pytest.mark.parametrize("schedule", ["exponential", "cosine"])
def test_rounds_equal_the_formula(schedule):
    """Four rounds with half of the clients in each: who is absent keeps its core model and its relations."""
    problem, steps, rounds = Quadratics.random(), 2, 4
    method = quadratic(APPLE, problem, mu=0.5, prior_rounds=3, schedule=schedule, relation_lr=0.02)
    federation = run(method, unequal(4), rounds=rounds, local_epochs=steps, participation=0.5)
    n = np.array([federation.data.client(k).num_samples for k in range(4)])
    prior = n / n.sum()
    p, cores = np.stack([prior] * 4), np.stack([problem.start] * 4)
    mixture = np.stack([problem.start] * 4)
    for round in range(rounds):
        progress = round / 3
        strength = 0.001**progress if schedule == "exponential" else (np.cos(np.pi * progress) + 1) / 2
        pull = 0.5 * strength if round < 3 else 0.0
        trained = cores.copy()
        for k in federation.participants(round):
            seen = cores.copy()
            for _ in range(steps):
                g = problem.gradient(k, p[k] @ seen)
                own, relations = p[k, k] * g, seen @ g + 2 * pull * (p[k] - prior)
                seen[k] = seen[k] - 0.1 * own
                p[k] = p[k] - 0.02 * relations
            trained[k], mixture[k] = seen[k], p[k] @ seen
        cores = trained
    server = federation.coordinator.server
    ids, found = server.mixing()
    assert ids == [0, 1, 2, 3]
    np.testing.assert_allclose(found, p, atol=1e-5)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(flat(member.learner.state_dict()), cores[k], atol=1e-5)
        if k in federation.participants(rounds - 1):
            with member.personalized() as learner:
                np.testing.assert_allclose(flat(learner.state_dict()), mixture[k], atol=1e-5)
            np.testing.assert_allclose(flat(member.learner.state_dict()), cores[k], atol=1e-5)
        member.download(server.reply(k))
        with member.personalized() as learner:
            np.testing.assert_allclose(flat(learner.state_dict()), p[k] @ cores, atol=1e-5)


def test_what_comes_back_are_the_others_and_the_own_one_before_the_first_upload():
    server = run(client(APPLE), skewed(), rounds=1, participation=2).coordinator.server
    [absent] = set(range(3)) - set(server.cores)
    for k in range(3):
        owners = {name.split("/")[1] for name in server.reply(k) if name.startswith("others/")}
        assert owners == {str(other) for other in range(3) if other != k}
        assert any(name.startswith("own/") for name in server.reply(k)) == (k == absent)


@pytest.mark.seconds
def test_only_the_own_model_is_standalone_bit_for_bit(monkeypatch):
    start = APPLEServer.start

    def alone(self, clients):
        start(self, clients)
        for k in clients:
            self.relations[k] = torch.eye(len(clients))[0]

    monkeypatch.setattr(APPLEServer, "start", alone)
    for data in (skewed, lambda: skewed(permute_labels=True)):
        ours, theirs = (run(client(kind, **more), data(), rounds=3) for kind, more in
                        ((APPLE, {"relation_lr": 0.0, "mu": 0.0}), (StandAlone, {})))  # fmt: skip
        for k, state in weights(theirs).items():
            assert_equal({name: weights(ours)[k][name] for name in state}, state)
        assert [tuple(row) for row in ours.rows] == [tuple(row) for row in theirs.rows]


def test_the_pull_ends():
    assert prior_strength("exponential", 0, 4) == prior_strength("cosine", 0, 4) == 1
    assert prior_strength("cosine", 2, 4) == pytest.approx(0.5)
    assert prior_strength("exponential", 4, 4) == prior_strength("cosine", 9, 4) == 0
