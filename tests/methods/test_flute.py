"""FLUTE against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FLUTE, FedPer
from lit_pfl.methods.partial.flute import PRESENT, away_from_simplex, stepped
from lit_pfl.testing import assert_equal
from tiny import Parts, client, run, weights

HEAD = "backbone.head.weight"


def in_numpy(w, present):
    c = len(w)
    simplex = (np.eye(c) - np.ones((c, c)) / c) * np.outer(present, present) / np.sqrt(c - 1)
    products = w @ w.T
    return np.linalg.norm(products / np.linalg.norm(products) - simplex)


def test_the_distance_and_the_server_s_step_equal_the_formula():
    rng = np.random.default_rng(0)
    w, present = rng.normal(size=(5, 3)), np.array([1, 1, 0, 1, 0])
    assert float(away_from_simplex(torch.tensor(w), torch.tensor(present))) == pytest.approx(in_numpy(w, present))
    slope = np.zeros_like(w)
    for i in np.ndindex(*w.shape):
        move = np.zeros_like(w)
        move[i] = 1e-6
        slope[i] = (in_numpy(w + move, present) - in_numpy(w - move, present)) / 2e-6
    np.testing.assert_allclose(stepped(torch.tensor(w), torch.tensor(present), 0.5), w - 0.5 * slope, atol=1e-6)


def test_a_simplex_is_at_distance_zero():
    simplex = torch.linalg.eigh(torch.eye(4) - 1 / 4).eigenvectors[:, 1:]
    assert float(away_from_simplex(simplex, torch.ones(4))) == pytest.approx(0, abs=1e-5)


@pytest.mark.seconds
def test_without_terms_and_with_all_trained_in_every_epoch_it_is_fedper(monkeypatch):
    monkeypatch.setattr(FLUTE, "begin_epoch", lambda self, *_: self.phases.train("head", "body"))
    off = {"lam1": 0.0, "lam2": 0.0, "lam3": 0.0, "server_lr": 0.0, "weighting": "samples"}
    a = run(client(FLUTE, **off), skewed(), rounds=3, local_epochs=2)
    b = run(client(FedPer), skewed(), rounds=3, local_epochs=2)
    assert_equal(weights(a), weights(b))


def test_the_loss_equals_the_formula():
    member = run(client(FLUTE, lam1=0.3, lam2=0.02, lam3=0.01), skewed(), rounds=1).clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    plain = nn.functional.cross_entropy(member.backbone(images), labels)
    w = member.backbone.head.weight.detach().double().numpy()
    shaped = 0.3 * in_numpy(w, (member.class_counts > 0).numpy()) + 0.02 * (w**2).sum()
    h = member.backbone.body(images).detach().double().numpy()
    member.begin_epoch(0, 2)
    assert float(member.objective((images, labels), 0)) == pytest.approx(float(plain) + shaped, rel=1e-5)
    assert not member.backbone.body[0].weight.requires_grad
    member.begin_epoch(1, 2)
    with_features = float(plain) + shaped + 0.01 * (h**2).sum()
    assert float(member.objective((images, labels), 0)) == pytest.approx(with_features, rel=1e-5)
    assert member.backbone.body[0].weight.requires_grad
    assert member.backbone.head.weight.requires_grad


@pytest.mark.seconds
def test_what_is_sent_and_what_comes_back():
    federation = run(client(FLUTE), skewed(), rounds=2)
    server = federation.coordinator.server
    uploads = {k: member.upload() for k, member in federation.clients.items()}
    body = np.mean([upload["backbone.body.0.weight"].numpy() for upload in uploads.values()], axis=0)
    for k, upload in uploads.items():
        reply = server.reply(k)
        np.testing.assert_allclose(reply["backbone.body.0.weight"], body, atol=1e-6)
        assert torch.equal(reply[HEAD], stepped(upload[HEAD], upload[PRESENT], 0.5 / len(uploads)))
        assert torch.equal(reply["backbone.head.bias"], upload["backbone.head.bias"])
        assert PRESENT not in reply
        counts = federation.clients[k].class_counts
        assert upload[PRESENT].tolist() == (counts > 0).int().tolist()


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match=r"^model\.body_epochs=2 leaves none of federation\.local_epochs=2"):
        run(client(FLUTE, body_epochs=2), skewed(), rounds=1, local_epochs=2)
    narrow = lambda channels, classes: Parts(  # noqa: E731
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, classes))
    )
    with pytest.raises(ConfigError, match=r"^model\.head: FLUTE shapes the weight of the head's last layer"):
        run(client(FLUTE, backbone=narrow), skewed(), rounds=1)
