"""FedDBE against its formula."""

import numpy as np
import torch
from heads import learners, skewed

from lit_pfl.methods import FedAvg, FedDBE
from lit_pfl.methods.partial.feddbe import MEAN, FedDBEServer, Shift
from tiny import assert_equal, client, run, weights


def test_without_the_term_and_a_vector_it_is_fedavg(monkeypatch):
    """From a known global mean, which a first round finds otherwise."""
    monkeypatch.setattr(FedDBEServer, "feature_mean", torch.zeros(16))
    monkeypatch.setattr(Shift, "forward", lambda self, features: features)
    a, b = run(client(FedDBE, kappa=0.0), skewed(), rounds=3), run(client(FedAvg), skewed(), rounds=3)
    assert_equal(learners(a), weights(b))


def test_the_first_round_leaves_a_mean_and_no_weights():
    federation = run(client(FedDBE), skewed(batch_size=1000), rounds=1)
    server = federation.coordinator.server
    means = torch.stack([member.upload()[MEAN] for member in federation.clients.values()]).numpy()
    n = [federation.data.client(k).num_samples for k in federation.clients]
    np.testing.assert_allclose(server.feature_mean, np.average(means, axis=0, weights=n), atol=1e-6)
    assert all(not member.extra["bias"].vector.any() for member in federation.clients.values())
    again = run(client(FedDBE), skewed(batch_size=1000), rounds=3)
    assert torch.equal(again.coordinator.server.feature_mean, server.feature_mean)
    assert all(member.extra["bias"].vector.any() for member in again.clients.values())
    one, other = (member.extra["bias"].vector for member in list(again.clients.values())[:2])
    assert not torch.equal(one, other)


def test_the_first_round_s_reply_is_the_initial_model():
    initial = {}

    class Kept(FedDBEServer):
        def start(self, clients):
            super().start(clients)
            initial.update({name: x.clone() for name, x in self.model.items()})

    class Method(FedDBE):
        def configure_server(self):
            return Kept()

    federation = run(client(Method), skewed(), rounds=1)
    assert_equal(dict(federation.coordinator.server.model), initial)


def test_the_objective_equals_the_formula():
    federation = run(client(FedDBE, kappa=7.0, mu=0.4), skewed(), rounds=2)
    member = federation.clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    member.begin_round()
    m = torch.zeros(16)
    for _ in range(2):  # the running mean goes on from batch to batch, without its gradient
        h = member.backbone.body(images)
        m = 0.6 * m.detach() + 0.4 * h.mean(0)
        loss = torch.nn.functional.cross_entropy(member.backbone.head(h + member.extra["bias"].vector), labels)
        expected = loss + 7 * ((m - member.common[MEAN]) ** 2 / 2).mean()
        torch.testing.assert_close(member.objective((images, labels), 0), expected)
        torch.testing.assert_close(member.upload()[MEAN], m.detach())


def test_the_vector_s_gradient_is_the_sum_over_the_batch():
    member = run(client(FedDBE, kappa=0.0), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    h = (member.backbone.body(images) + member.extra["bias"].vector).detach().requires_grad_()
    by_features = torch.autograd.grad(torch.nn.functional.cross_entropy(member.backbone.head(h), labels), h)[0]
    [gradient] = torch.autograd.grad(member.objective((images, labels), 0), member.extra["bias"].vector)
    torch.testing.assert_close(gradient, by_features.sum(0))


def test_what_is_evaluated_has_the_vector():
    federation = run(client(FedDBE), skewed(), rounds=2)
    member = federation.clients[0]
    images, _ = next(iter(member.data.val))
    member.eval()
    with torch.no_grad(), member.personalized() as learner:
        shifted = learner(images)
    with torch.no_grad():
        own = member.extra["bias"].vector
        torch.testing.assert_close(shifted, member.backbone.head(member.backbone.body(images) + own))
