"""FedProx against its formula."""

import numpy as np
import pytest
import torch
from quadratic import (
    Quadratics,
    SoftmaxRegression,
    chosen,
    equal,
    flat,
    quadratic,
    sizes,
    softmax_regression,
    unequal,
)

from lit_pfl.methods import FedProx
from lit_pfl.ops import squared_distance
from tiny import client, digits, run


def by_the_formula(problem, n, participants, lr, epochs, mu, decay=0.0, clip=np.inf) -> np.ndarray:
    """Full batches: ``w <- w - lr (grad f(w) + mu (w - w_t))``, then the mean by samples."""
    w = problem.start
    for ids in participants:
        local = []
        for k in ids:
            x = w
            for _ in range(epochs):
                gradient = problem.gradient(k, x) + mu * (x - w)
                x = x - lr * (gradient * min(1, clip / np.linalg.norm(gradient)) + decay * x)
            local.append(x)
        w = np.average(local, axis=0, weights=n[ids])
    return w


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("mu", [0.01, 1.0])
def test_updates_equal_the_formula(mu, participation):
    problem = Quadratics.random()
    method = quadratic(FedProx, problem, mu=mu)
    federation = run(method, unequal(), rounds=4, local_epochs=5, participation=participation)
    n = sizes(federation)
    expected = by_the_formula(problem, n, chosen(federation, 4), 0.1, 5, mu)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, rtol=1e-12)
    assert len(set(n)) == 4
    assert np.abs(expected - by_the_formula(problem, n, chosen(federation, 4), 0.1, 5, 0.0)).max() > 1e-4


def test_updates_on_digits_equal_the_formula():
    federation = run(softmax_regression(FedProx, mu=0.5), unequal(), rounds=3, local_epochs=4, participation=0.75)
    expected = by_the_formula(SoftmaxRegression(federation), sizes(federation), chosen(federation, 3), 0.1, 4, 0.5)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, atol=1e-6)


def test_gradient_clipping_takes_the_term_in():
    problem = Quadratics.random()
    clipped = {"gradient_clip_val": 0.5}
    federation = run(quadratic(FedProx, problem, mu=1.0), unequal(), rounds=3, local_epochs=5, client_trainer=clipped)
    expected = by_the_formula(problem, sizes(federation), chosen(federation, 3), 0.1, 5, 1.0, clip=0.5)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, atol=1e-5)


@pytest.mark.seconds
def test_averaging_with_a_strong_term_ends_nearer_to_the_optimum():
    problem, shares = Quadratics.random(2), np.array([0.5, 0.5])
    ends = {}
    for mu in (0.0, 5.0):
        federation = run(quadratic(FedProx, problem, mu=mu), equal(2, batches=5), rounds=25)
        ends[mu] = flat(federation.coordinator.server.model)
    np.testing.assert_allclose(ends[0.0], problem.fixed_point_of_averaging(shares, 0.1, 5), atol=1e-3)
    away = {mu: np.linalg.norm(w - problem.optimum(shares)) for mu, w in ends.items()}
    assert away[5.0] < 0.8 * away[0.0]


def test_heads_at_home_are_not_held():
    member = client(FedProx, mu=100.0, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    federation = run(member, digits(3, permute_labels=True), rounds=2)
    assert not [name for name in federation.clients[0].upload() if ".head." in name]
    member = federation.clients[0]
    member.start_epoch(0, 1)
    assert not [name for name in member.received if ".head." in name]
    with torch.no_grad():
        for parameter in member.backbone.parameters():
            parameter += 0.1
    shared = sum(weight.numel() for weight in member.shared_weights().values())
    assert 0 < shared < sum(p.numel() for p in member.backbone.parameters())
    images, labels = next(iter(federation.data.client(0).val))
    member.eval()
    with_term, member.mu = member.objective((images, labels), 0), 0.0
    torch.testing.assert_close(with_term - member.objective((images, labels), 0), torch.tensor(50 * 0.01 * shared))


def test_averaged_running_statistics_and_nothing_left_behind():
    federation = run(client(FedProx, norm_stats="averaged"), equal(2), rounds=2)
    mean = torch.stack([c.backbone.body[1].running_mean for c in federation.clients.values()]).mean(0)
    torch.testing.assert_close(federation.coordinator.server.model["backbone.body.1.running_mean"], mean)
    assert all(not member.received for member in federation.clients.values())


def test_squared_distance():
    a, b = (
        {"x": torch.tensor([1.0, 2.0]), "y": torch.ones(2, 2)},
        {"x": torch.tensor([0.0, 4.0]), "y": torch.zeros(2, 2)},
    )
    assert squared_distance(a, b) == 9
