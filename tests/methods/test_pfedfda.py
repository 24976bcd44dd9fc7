"""pFedFDA against its formulas."""

import numpy as np
import pytest
import torch
from heads import features, skewed, whole_data
from scipy.optimize import minimize

from lit_pfl.methods import PFedFDA
from lit_pfl.methods.partial import pfedfda
from lit_pfl.methods.partial.pfedfda import (
    COVARIANCE,
    MEANS,
    best_betas,
    discriminant,
    gaussians,
    mix,
    two_folds,
)
from tiny import client, run

EPS = 1e-4


def in_numpy(h, means, covariance, priors):
    """The logarithm of the classes' joint densities, but for what all classes have in common."""
    d = len(covariance)
    inverse = np.linalg.inv((1 - EPS) * covariance + EPS * np.trace(covariance) / d * np.eye(d))
    return np.stack([h @ inverse @ m - m @ inverse @ m / 2 + np.log(p) for m, p in zip(means, priors, strict=True)], 1)


def own_in_numpy(h, y, common):
    classes, d = common.shape
    means = np.stack([h[y == c].mean(0) if (y == c).sum() > 2 else common[c] for c in range(classes)])
    away = h - means[y]
    return means, away.T @ away / (len(h) - 1) + EPS + np.eye(d)


def some(seed=0, n=40):
    rng = np.random.default_rng(seed)
    y = rng.choice([0, 0, 1, 2, 2], n)
    y[:3] = 4, 4, 3
    h = rng.normal(size=(n, 3)) + 2 * np.eye(5, 3)[y]
    return h, y, rng.normal(size=(5, 3)), np.full(5, 0.2)


def test_gaussians_and_their_classifier_equal_the_formulas():
    h, y, common, priors = some()
    means, covariance = gaussians(torch.tensor(h), torch.tensor(y), torch.tensor(common), EPS)
    expected = own_in_numpy(h, y, common)
    np.testing.assert_allclose(means, expected[0])
    np.testing.assert_allclose(covariance, expected[1])
    np.testing.assert_array_equal(means[4], common[4])  # two samples are too few
    weight, bias = discriminant(means, covariance, torch.tensor(priors), EPS)
    np.testing.assert_allclose(h @ weight.numpy().T + bias.numpy(), in_numpy(h, *expected, priors))


def test_folds_hold_half_of_every_class():
    y = torch.tensor([0] * 6 + [1] * 3 + [2] + [3] * 2)
    first, second = two_folds(y, seed=1)
    assert sorted(torch.cat([first, second]).tolist()) == [i for i in range(12) if i != 9]
    assert torch.bincount(y[first], minlength=4).tolist() == [3, 2, 0, 1]
    assert torch.bincount(y[second], minlength=4).tolist() == [3, 1, 0, 1]


def test_the_shares_minimise_the_loss_on_the_folds():
    h, y, common, priors = some(n=60)
    covariance = 3 * np.eye(3)
    tensors = [torch.tensor(x) for x in (h, y, common, covariance, priors)]
    folds = two_folds(tensors[1], seed=0)
    for single in (False, True):
        found = best_betas(*tensors[:2], folds, tuple(tensors[2:4]), tensors[4], EPS, single).numpy()

        def loss(b, single=single):
            b = np.clip(b, 0, 1)
            total = 0.0
            for train, test in (folds, folds[::-1]):
                own = own_in_numpy(h[train], y[train], common)
                means = b[0] * own[0] + (1 - b[0]) * common
                z = in_numpy(h[test], means, b[-1] * own[1] + (1 - b[-1]) * covariance, priors)
                total += (np.log(np.exp(z).sum(1)) - z[np.arange(len(test)), y[test]]).mean()
            return total

        size = 1 if single else 2
        best = minimize(loss, np.full(size, 0.5), bounds=[(0, 1)] * size)
        assert found.shape == (size,)
        assert loss(found) <= best.fun + 1e-3


def test_without_two_samples_of_a_class_the_common_gaussians_stay():
    h = torch.randn(3, 2, dtype=torch.float64)
    y = torch.arange(3)
    common = torch.zeros(3, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    betas = best_betas(h, y, two_folds(y, 0), common, torch.full((3,), 1 / 3), EPS, False)
    assert betas.tolist() == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(mix(betas, (h, h.T @ h), common), common, strict=True))


@pytest.mark.seconds
def test_where_no_client_s_own_counts_all_keep_what_they_received(monkeypatch):
    monkeypatch.setattr(pfedfda, "best_betas", lambda *_: torch.zeros(2, dtype=torch.float64))
    federation = run(client(PFedFDA), skewed(), rounds=2)
    server = federation.coordinator.server
    assert torch.equal(server.model[COVARIANCE], torch.eye(16))
    for member in federation.clients.values():
        torch.testing.assert_close(member.upload()[MEANS], server.model[MEANS])


@pytest.mark.seconds
def test_what_is_sent_evaluated_and_trained_equals_the_formula():
    federation = run(client(PFedFDA), skewed(), rounds=2)
    member, server = federation.clients[1], federation.coordinator.server
    assert not [name for name in member.upload() if ".head." in name]
    n = [federation.data.client(k).num_samples for k in federation.clients]
    uploads = [one.upload() for one in federation.clients.values()]
    for name in (MEANS, COVARIANCE):
        mean = np.average([upload[name].numpy() for upload in uploads], axis=0, weights=n)
        np.testing.assert_allclose(server.reply(0)[name], mean, atol=1e-5)
    h, y = features(federation, 1), whole_data(federation, 1)[1].numpy()
    priors = np.bincount(y, minlength=10) / len(y) + EPS
    priors /= priors.sum()
    common = [member.common[name].double().numpy() for name in (MEANS, COVARIANCE)]
    own = own_in_numpy(h, y, common[0])
    sent = [uploads[1][name].double().numpy() for name in (MEANS, COVARIANCE)]
    b = [np.vdot(x - c, o - c) / np.vdot(o - c, o - c) for x, c, o in zip(sent, common, own, strict=True)]
    assert all(0 <= share <= 1 + 1e-6 for share in b)
    for x, c, o, share in zip(sent, common, own, b, strict=True):
        np.testing.assert_allclose(x, share * o + (1 - share) * c, atol=1e-4)

    images = next(iter(member.data.val))[0]
    with torch.no_grad():
        below = member.backbone.body.eval()(images).double().numpy()
        with member.personalized() as learner:
            found = learner.backbone(images)
    np.testing.assert_allclose(found, in_numpy(below, *sent, priors), atol=2e-3)

    member.begin_round()
    images, labels = next(iter(member.data.train))
    z = in_numpy(member.backbone.body(images).detach().double().numpy(), *common, priors)
    expected = (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]).mean()
    np.testing.assert_allclose(float(member.objective((images, labels), 0).detach()), expected, rtol=1e-4)
