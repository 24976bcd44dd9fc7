"""GPFL against its formulas."""

import numpy as np
import pytest
import torch
from heads import learners, skewed

from lit_pfl.methods import GPFL, FedPer
from lit_pfl.methods.partial.gpfl import Conditional
from lit_pfl.models import Backbone
from tiny import TinyNet, assert_equal, client, run, weights


def norm(x):
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5)


def test_the_conditional_layer_equals_the_formula():
    torch.manual_seed(0)
    layer, h, c = Conditional(4), torch.randn(3, 4), torch.randn(4)
    a = {name: x.detach().numpy() for name, x in layer.state_dict().items()}
    gamma, beta = (
        norm(np.maximum(a[f"{part}.0.weight"] @ c.numpy() + a[f"{part}.0.bias"], 0)) for part in ("gamma", "beta")
    )
    expected = np.maximum(h.numpy() * (gamma + 1) + beta, 0)
    np.testing.assert_allclose(layer(h, c).detach(), expected, atol=1e-5)


@pytest.mark.seconds
def test_the_objective_equals_the_formula():
    member = run(client(GPFL, lam=0.3), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.begin_round()
    with torch.no_grad():
        member.extra["embeddings"].weight += 0.1  # as if it had trained on
    member.eval()
    h, e, cov = member.backbone.body(images), member.extra["embeddings"].weight, member.extra["conditional"]
    assert member.conditions["personal"].any()
    p, g = (cov(h, member.conditions[name]) for name in ("personal", "generic"))
    cosines = (g @ e.T) / g.norm(dim=1, keepdim=True) / e.norm(dim=1)
    assert cosines.abs().max() <= 1 + 1e-6
    expected = (
        torch.nn.functional.cross_entropy(member.backbone.head(p), labels)
        + torch.nn.functional.cross_entropy(cosines, labels)
        + 0.3 * (g - (e - 0.1)[labels]).square().sum().sqrt()
    )
    torch.testing.assert_close(member.objective((images, labels), 0), expected)


@pytest.mark.seconds
def test_conditions_are_of_the_client_s_own_embeddings_before_the_received_ones():
    member = run(client(GPFL), skewed(), rounds=2).clients[0]
    e, n = member.extra["embeddings"].weight.detach().clone(), member.class_counts
    reply = {name: torch.zeros_like(x) for name, x in member.upload().items()}
    member.download(reply)
    torch.testing.assert_close(member.conditions["generic"], e.mean(0))
    torch.testing.assert_close(member.conditions["personal"], (n[:, None] * e).sum(0) / n.sum())
    assert not member.extra["embeddings"].weight.any()
    untrained = run(client(GPFL), skewed(), rounds=1).clients[0]
    assert not untrained.conditions["generic"].any()


def test_weight_decay_is_of_the_further_modules_only():
    member = run(client(GPFL), skewed(), rounds=1).clients[0]
    batch = next(iter(member.data.train))
    member.begin_round()
    member.eval()
    weights_ = [member.extra["embeddings"].weight, member.backbone.body[0].weight]
    grads = {}
    for mu in (0.0, 0.2):
        member.mu = mu
        grads[mu] = torch.autograd.grad(member.objective(batch, 0), weights_)
    torch.testing.assert_close(grads[0.2][0] - grads[0.0][0], 0.2 * weights_[0].detach(), atol=1e-6, rtol=1e-4)
    assert torch.equal(grads[0.2][1], grads[0.0][1])


class Rectified(Backbone):
    """A network whose head gets the positive parts of the features."""

    def __init__(self, channels: int, classes: int) -> None:
        tiny = TinyNet(channels, classes)
        super().__init__(torch.nn.Sequential(tiny.body, torch.nn.ReLU()), tiny.head)


@pytest.mark.seconds
def test_without_scale_shift_and_terms_it_is_fedper_on_positive_features(monkeypatch):
    monkeypatch.setattr(Conditional, "forward", lambda self, features, condition: features.relu() + 0 * condition)
    monkeypatch.setattr(torch.nn.functional, "normalize", lambda x: 0 * x)
    a = run(client(GPFL, lam=0.0, mu=0.0, backbone=Rectified), skewed(), rounds=2)
    monkeypatch.undo()
    b = run(client(FedPer, backbone=Rectified), skewed(), rounds=2)
    own, other = learners(a), weights(b)
    for k, tensors in other.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(own[k][name], tensor, atol=1e-5, rtol=1e-4)
    assert_equal(own[0]["backbone.body.0.0.weight"], other[0]["backbone.body.0.0.weight"])


def test_what_travels():
    member = run(client(GPFL), skewed(), rounds=1).clients[0]
    names = set(member.upload())
    assert {name.split(".")[1] for name in names if name.startswith("extra")} == {"embeddings", "conditional"}
    assert not [name for name in names if "head" in name]
