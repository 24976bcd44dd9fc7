"""Floco against its formulas."""

from functools import partial

import numpy as np
import pytest
import torch
from heads import learners, skewed
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, Floco
from lit_pfl.methods.partial.floco import CENTER, ENDPOINTS, energy, regions
from lit_pfl.testing import MethodTester, assert_equal
from lit_pfl.testing.methods import (
    clients_that_do_not_take_part_stay_as_they_are,
    resumed_equals_uninterrupted,
    servers_work_on_the_clients_device_also_after_a_resume,
    the_order_of_clients_does_not_matter,
)
from tiny import Parts, client, run, weights

HEAD = "backbone.head.weight"


@pytest.mark.seconds
def test_one_endpoint_is_fedavg():
    a, b = (run(client(method, **options), skewed(), rounds=3) for method, options in
            ((Floco, {"endpoints": 1}), (FedAvg, {})))  # fmt: skip
    ours, theirs = learners(a), weights(b)
    for k, member in a.clients.items():
        ours[k][HEAD] = member.extra["simplex"].endpoints[0].detach()
    assert_equal(ours, theirs)


def simplex_in_numpy(v, total):
    u = np.sort(v)[::-1]
    css = np.cumsum(u) - total
    k = np.nonzero(u - css / (np.arange(len(v)) + 1) > 0)[0][-1]
    return np.maximum(v - css[k] / (k + 1), 0)


@pytest.mark.seconds
def test_regions_equal_the_formula():
    updates = np.random.default_rng(0).normal(size=(6, 20)) * np.linspace(0.1, 1, 20)
    away = updates - updates.mean(0)
    _, _, vt = np.linalg.svd(away, full_matrices=False)
    points = away @ vt[:3].T
    points *= np.sign(np.take_along_axis(points, np.abs(points).argmax(0)[None], 0))
    best, least = None, np.inf
    for total in np.linspace(1e-4, 1, 1000):
        found = np.stack([simplex_in_numpy(p, total) / total for p in points])
        apart = np.array([np.linalg.norm(found[i] - found[j]) for i in range(6) for j in range(i)])
        e = (1 / np.maximum(apart, 1e-4) ** 2).sum()
        assert float(energy(torch.tensor(found))) == pytest.approx(e, rel=1e-5)
        if e < least:
            best, least = found, e
    np.testing.assert_allclose(regions(torch.tensor(updates), 3), best, atol=1e-5)


def test_fewer_clients_than_endpoints_and_a_single_one():
    found = regions(torch.randn(3, 8), 5)
    assert found.shape == (3, 5)
    torch.testing.assert_close(found.sum(1), torch.ones(3))
    torch.testing.assert_close(regions(torch.randn(1, 8), 4), torch.full((1, 4), 0.25))


def test_the_head_is_the_mixture():
    federation = run(client(Floco, endpoints=3, tau=1), skewed(), rounds=2)
    member, server = federation.clients[1], federation.coordinator.server
    for k in federation.clients:
        torch.testing.assert_close(server.reply(k)[CENTER], server.centers[k])
    assert len({tuple(center.tolist()) for center in server.centers.values()}) > 1
    assert torch.equal(member.center, server.centers[1])
    assert HEAD not in member.upload()

    images, labels = next(iter(member.data.train))
    member.eval()
    h = member.backbone.body(images).detach().numpy()
    endpoints, bias = (x.detach().numpy() for x in (member.extra["simplex"].endpoints, member.backbone.head.bias))

    def logits(a):
        return h @ np.tensordot(a, endpoints, 1).T + bias

    with torch.no_grad(), member.personalized() as learner:
        np.testing.assert_allclose(learner.backbone(images), logits(member.center.numpy()), atol=1e-5)
    state = torch.get_rng_state()
    drawn = member._drawn()
    torch.set_rng_state(state)
    loss = float(member.objective((images, labels), 0).detach())
    z = torch.tensor(logits(drawn.numpy()))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(z, labels)), rel=1e-5)
    for _ in range(50):
        drawn = member._drawn()
        assert float(drawn.sum()) == pytest.approx(1, abs=1e-5)
        assert float((drawn - member.center).abs().sum()) < 0.25
    assert float(drawn.sub(member.center).abs().sum()) > 0


def test_before_round_tau_mixtures_are_of_all_the_simplex():
    federation = run(client(Floco, endpoints=3, tau=5), skewed(), rounds=2)
    member, server = federation.clients[0], federation.coordinator.server
    assert not member.center.any()
    assert not server.reply(0)[CENTER].any()
    drawn = torch.stack([member._drawn() for _ in range(500)])
    torch.testing.assert_close(drawn.sum(1), torch.ones(500))
    torch.testing.assert_close(drawn.mean(0), torch.full((3,), 1 / 3), atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.full((3,), 1 / 18), atol=0.02, rtol=0)  # of Dirichlet(1, 1, 1)
    n = [federation.data.client(k).num_samples for k in federation.clients]
    uploads = [one.upload()[ENDPOINTS].numpy() for one in federation.clients.values()]
    np.testing.assert_allclose(server.reply(0)[ENDPOINTS], np.average(uploads, axis=0, weights=n), atol=1e-6)


@pytest.mark.seconds
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "check",
    [
        resumed_equals_uninterrupted,
        servers_work_on_the_clients_device_also_after_a_resume,
        the_order_of_clients_does_not_matter,
        clients_that_do_not_take_part_stay_as_they_are,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("tau", [1, 3])
def test_regions_hold_the_rules(check, tau):
    check(MethodTester(partial(Floco, tau=tau, endpoints=2)))


def test_what_cannot_be_is_said():
    deep = lambda channels, classes: Parts(  # noqa: E731
        nn.Flatten(), nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))
    )
    with pytest.raises(ConfigError, match=r"^model\.head: Floco needs a head with a linear layer and nothing else"):
        run(client(Floco, backbone=deep), skewed(), rounds=1)
    with pytest.raises(ConfigError, match=r"^model\.rho=1\.0: Floco's regions need a radius below 1"):
        Floco(rho=1.0)
    with pytest.raises(ConfigError, match=r"^model\.share_head=false: Floco averages the endpoints"):
        run(client(Floco, share_head=False), skewed(), rounds=1)
