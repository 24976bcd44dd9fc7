"""pFedMe against its formula."""

import numpy as np
import pytest
import torch
from heads import Uniform
from quadratic import Quadratics, chosen, equal, flat, quadratic, sgd

from lit_pfl.core import ServerAdam
from lit_pfl.errors import ConfigError
from lit_pfl.methods import PFedMe
from tiny import assert_equal, client, run


def plain(**options):
    return client(PFedMe, **{"optimizer": sgd(0.01), "scheduler": None, **options})


def by_the_formula(problem, participants, lr, lam, steps, inner_lr, beta, batches, decay=0.0):
    w, personal = problem.start, {}
    for ids in participants:
        local = []
        for k in ids:
            x = theta = w
            for _ in range(batches):
                for _ in range(steps):
                    theta = theta - inner_lr * (problem.gradient(k, theta) + lam * (theta - x))
                x = x - lr * (lam * (x - theta) + decay * x)
            local.append(x)
            personal[k] = theta
        w = (1 - beta) * w + beta * np.mean(local, axis=0)
    return w, personal


@pytest.mark.seconds
@pytest.mark.parametrize("beta", [1.0, 1.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rounds_equal_the_formula(beta, decay):
    problem = Quadratics.random()
    method = quadratic(PFedMe, problem, optimizer=sgd(0.02, weight_decay=decay), lam=3.0, inner_lr=0.05, beta=beta)
    federation = run(method, equal(4, batches=3), rounds=3, local_epochs=2, participation=0.75)
    w, personal = by_the_formula(problem, chosen(federation, 3), 0.02, 3.0, 5, 0.05, beta, 6, decay)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, rtol=1e-9)
    for k, theta in personal.items():
        with federation.clients[k].personalized() as learner:
            np.testing.assert_allclose(flat(learner.state_dict()), theta, rtol=1e-9)


def test_many_inner_steps_find_the_envelope():
    """On ``c / 2 |theta|^2`` theta ends at ``lam w / (c + lam)``."""
    problem = Quadratics(np.stack([2.0 * np.eye(3)] * 2), np.zeros((2, 3)))
    method = quadratic(PFedMe, problem, optimizer=sgd(1e-12), lam=3.0, inner_steps=200, inner_lr=0.1)
    federation = run(method, equal(2), rounds=1)
    with federation.clients[0].personalized() as learner:
        np.testing.assert_allclose(flat(learner.state_dict()), 3 * problem.start / 5, atol=1e-9)


@pytest.mark.seconds
def test_without_the_pull_the_common_model_stays_where_it_is():
    federation = run(plain(lam=0.0, inner_lr=0.01), rounds=2)
    with federation.draws.default_generators("weights"):
        first = federation.prototype.build(federation.clients[0].spec).learner.state_dict()
    model = federation.coordinator.server.model
    assert_equal(dict(model), {name: first[name] for name in model})
    personal = federation.clients[0].personal.state_dict()
    assert not torch.equal(personal["backbone.head.weight"], first["backbone.head.weight"])


def test_running_statistics_are_those_of_the_personal_model():
    federation = run(plain(norm_stats="averaged", inner_lr=0.01), equal(2), rounds=2)
    for member in federation.clients.values():
        own, personal = (dict(learner.named_buffers()) for learner in (member.learner, member.personal))
        assert_equal(own, personal)
    assert federation.clients[0].backbone.body[1].num_batches_tracked > 0


@pytest.mark.seconds
def test_it_sends_what_fedavg_sends():
    a, b = run(plain(inner_lr=0.01), rounds=2), run(client(Uniform, optimizer=sgd(0.01)), rounds=2)
    assert_equal(a.traffic.state_dict(), b.traffic.state_dict())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, sgd(0.1, momentum=0.9)])
def test_only_plain_sgd(optimizer):
    with pytest.raises(ConfigError, match=r"^model\.optimizer: in PFedMe w goes"):
        run(plain(optimizer=optimizer), rounds=1)


def test_beta_is_a_server_optimizer():
    with pytest.raises(ConfigError, match=r"^model\.beta=0\.5: it is a server optimizer itself"):
        PFedMe(beta=0.5, server_optimizer=ServerAdam(lr=0.1))
    assert isinstance(PFedMe(server_optimizer=ServerAdam(lr=0.1)).server_optimizer, ServerAdam)


@pytest.mark.seconds
def test_the_reported_loss_is_the_personal_model_s():
    class Noted(PFedMe):
        def personal_loss(self, *args):
            self.last = super().personal_loss(*args)
            return self.last

        def objective(self, *args):
            whole = super().objective(*args)
            assert whole.item() == self.last.item()
            return whole

    run(client(Noted, optimizer=sgd(0.1)))
