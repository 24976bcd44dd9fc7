"""FedRoD against its formula."""

import numpy as np
import pytest
import torch
from heads import skewed, softmax
from quadratic import equal, sgd, softmax_regression
from torch import nn

from lit_pfl.data import Dirichlet
from lit_pfl.errors import ConfigError
from lit_pfl.learners import linear_layers
from lit_pfl.methods import FedRoD
from lit_pfl.methods.partial.fedrod import ABSENT, log_prior, silence
from lit_pfl.nn import FactorizedLinear
from tiny import assert_equal, client, digits, run


def test_equal_counts_are_no_prior():
    assert_equal(log_prior(torch.full((4,), 7)), torch.zeros(4))
    assert_equal(log_prior(torch.tensor([4, 0, 1]), 0.5), torch.tensor([0.0, ABSENT, 0.5 * np.log(0.25)]).float())
    assert_equal(log_prior(torch.tensor([4, 0, 1]), 0.0), torch.zeros(3))


def test_a_personal_head_of_zero_changes_no_score():
    federation = run(client(FedRoD), skewed(), rounds=1, evaluate="after")
    member = federation.clients[0]
    images, _ = next(iter(member.data.val))
    member.eval()
    with torch.no_grad():
        for weight in member.extra.parameters():
            weight.zero_()
        with member.personalized() as learner:
            assert torch.equal(learner(images), member.backbone(images))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
        lambda: FactorizedLinear(4, 3, rank=2, mask=False),
        lambda: FactorizedLinear(4, 3, rank=2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    ],
    ids=["two layers", "norm", "factors", "factors and mask", "weight norm"],
)
def test_a_head_of_any_kind_starts_at_zero_and_learns(make):
    head, x, y = make(), torch.randn(9, 4), torch.arange(9) % 3
    silence(linear_layers(head)[-1])
    assert (head(x) == 0).all()
    for _ in range(2):
        head.zero_grad()
        nn.functional.cross_entropy(head(x), y).backward()
        with torch.no_grad():
            for weight in head.parameters():
                weight -= 0.1 * weight.grad
    assert all(weight.grad.abs().max() > 0 for weight in head.parameters())


def test_a_head_that_cannot_be_zero_is_refused():
    with pytest.raises(
        ConfigError, match=r"^model\.start=zero: .*a Parametrized\w*, cannot be zero; give start=copy\.$"
    ):
        silence(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))


def test_updates_equal_the_formula():
    """Softmax regression on full batches, in NumPy: the features are the pixels."""
    data = digits(2, batch_size=2000, partition=Dirichlet(alpha=0.5))
    federation = run(softmax_regression(FedRoD, optimizer=sgd(0.1)), data, rounds=2, local_epochs=3)
    start = run(softmax_regression(FedRoD, optimizer=sgd(0.0)), data, rounds=1).clients[0].backbone.head
    w = np.hstack([start.weight.detach().double().numpy(), start.bias.detach().double().numpy()[:, None]])
    sets = []
    for k in federation.clients:
        [(images, labels)] = federation.data.client(k).train.in_order(2000)
        x = np.hstack([images.flatten(1).double().numpy(), np.ones((len(images), 1))])
        sets.append((x, np.eye(10)[labels.numpy()], np.bincount(labels.numpy(), minlength=10)))
    own = [np.zeros_like(w) for _ in sets]

    for _ in range(2):
        local = []
        for k, (x, y, n) in enumerate(sets):
            g = w
            for _ in range(3):
                balanced, personal = softmax(x @ g.T) * n, softmax(x @ (g + own[k]).T)
                balanced /= balanced.sum(1, keepdims=True)
                g, own[k] = g - 0.1 * (balanced - y).T @ x / len(x), own[k] - 0.1 * (personal - y).T @ x / len(x)
            local.append(g)
        w = np.average(local, axis=0, weights=[len(x) for x, _, _ in sets])
    model = federation.coordinator.server.model
    np.testing.assert_allclose(model["backbone.head.weight"], w[:, :-1], atol=1e-5)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(member.extra["own"].weight.detach(), own[k][:, :-1], atol=1e-5)
        np.testing.assert_allclose(member.extra["own"].bias.detach(), own[k][:, -1], atol=1e-5)


def test_the_personal_head_stays_at_home():
    federation = run(client(FedRoD), equal(2), rounds=1)
    assert not [name for name in federation.clients[0].upload() if "extra" in name]
