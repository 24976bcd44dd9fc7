"""FedEM against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed, softmax, whole_data
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedEM
from lit_pfl.methods.similarity.fedem import log_mixture, responsibilities
from lit_pfl.nn.factorization import Factorization
from tiny import Learner, client, run


def test_responsibilities_and_mixture_equal_the_formulas():
    rng = np.random.default_rng(0)
    z, y, pi = rng.normal(size=(5, 4, 3)), rng.integers(0, 4, 5), np.array([0.5, 0.3, 0.2])
    p = np.stack([softmax(z[:, :, m]) for m in range(3)], 2)
    q = pi * p[np.arange(5), y]
    found = responsibilities(torch.tensor(z), torch.tensor(y), torch.tensor(pi))
    np.testing.assert_allclose(found, q / q.sum(1, keepdims=True), rtol=1e-5)
    mixed = log_mixture([torch.tensor(z[:, :, m]) for m in range(3)], torch.tensor(pi))
    np.testing.assert_allclose(mixed, np.log((p * pi).sum(2)), rtol=1e-6)


def logits(member, images):
    with torch.no_grad():
        return [c.backbone.eval()(images).double().numpy() for c in member.learners.values()]


def test_a_round_equals_the_formula():
    federation = run(client(FedEM), skewed(), rounds=2)
    member = federation.clients[1]
    images, labels = whole_data(federation, 1)
    before = member.mixture.double().numpy()
    p = np.stack([softmax(z)[np.arange(len(labels)), labels] for z in logits(member, images)], 1)
    q = p * before / (p * before).sum(1, keepdims=True)
    member.begin_round()
    np.testing.assert_allclose(member.mixture, q.mean(0), atol=1e-5)
    assert len({round(float(x), 3) for x in member.mixture}) > 1

    for component in member.learners.values():
        component.eval()
    some = slice(0, 9)
    loss = member.objective((images[some], labels[some]), 0)
    np.testing.assert_allclose(float(loss.detach()), (q[some] * -np.log(p[some])).sum(1).mean(), rtol=1e-5)
    for m, component in enumerate(member.learners.values()):
        [found] = torch.autograd.grad(loss, component.backbone.head.bias, retain_graph=True)
        z = softmax(logits(member, images[some])[m])
        expected = (q[some, m : m + 1] * (z - np.eye(10)[labels[some]])).mean(0)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_all_models_are_averaged_by_samples():
    federation = run(client(FedEM, components=2), skewed(), rounds=2)
    uploads = [member.upload() for member in federation.clients.values()]
    assert {name.split("/")[0] for name in uploads[0]} == {"0", "1"}
    n = [federation.data.client(k).num_samples for k in federation.clients]
    for m in range(2):
        name = f"{m}/backbone.body.0.weight"
        mean = np.average([upload[name].numpy() for upload in uploads], axis=0, weights=n)
        np.testing.assert_allclose(federation.coordinator.server.reply(0)[name], mean, atol=1e-6)
    assert not torch.equal(uploads[0]["0/backbone.body.0.weight"], uploads[0]["1/backbone.body.0.weight"])


def test_what_is_evaluated_is_the_mixture():
    member = run(client(FedEM), skewed(), rounds=2).clients[0]
    images = next(iter(member.data.val))[0]
    expected = np.log(sum(float(pi) * softmax(z) for pi, z in zip(member.mixture, logits(member, images), strict=True)))
    with torch.no_grad(), member.personalized() as learner:
        np.testing.assert_allclose(learner.eval()(images), expected, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(member.standalone()(images), expected, atol=1e-5)
        assert not np.allclose(member.learner(images), expected)


def test_a_client_that_has_not_trained_finds_its_mixture_from_what_it_received():
    federation = run(client(FedEM), skewed(), rounds=1, participation=2)
    [k] = {0, 1, 2} - set(federation.participants(0))
    member = federation.clients[k]
    member.download(federation.coordinator.server.reply(k))
    images, labels = whole_data(federation, k)
    p = np.stack([softmax(z) for z in logits(member, images)], 2)
    q = p[np.arange(len(labels)), labels]
    mixture = (q / q.sum(1, keepdims=True)).mean(0)
    assert len({round(float(x), 3) for x in mixture}) > 1
    expected = np.log((p * mixture).sum(2))
    with torch.no_grad(), member.personalized() as learner:
        np.testing.assert_allclose(learner.eval()(images), expected, atol=1e-5)
    np.testing.assert_allclose(member.standalone()(images).detach(), expected, atol=1e-5)
    assert torch.equal(member.mixture, torch.full((3,), 1 / 3))  # from which it begins to train


class Quiet(Learner):
    """Does not call its ``forward``."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match=r"^model\.factorization: FedEM averages several models of dense weights"):
        client(FedEM, factorization=Factorization())
    with pytest.raises(ConfigError, match=r"^model\.learner: FedEM mixes what forward returns, and .* of Quiet"):
        run(FedEM(learner=Quiet()), skewed(), rounds=1)
    run(FedEM(learner=Quiet(), components=1), skewed(), rounds=1)
