"""FedBABU: the head stays as it was, and fine-tuning is SGD that leaves no trace."""

import numpy as np
import pytest
import torch
from quadratic import SoftmaxRegression, flat
from torch import nn

from lit_pfl.data.loaders import in_order
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedBABU, FedPer
from tiny import Parts, TinyNet, assert_equal, client, digits, run, weights


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def heads(federation):
    return [{n: t for n, t in state.items() if ".head." in n} for state in weights(federation).values()]


@pytest.mark.slow
def test_the_head_stays_as_it_was_whatever_the_optimizer():
    short = run(client(FedBABU, optimizer=decaying), rounds=1)
    federation = run(client(FedBABU, optimizer=decaying), rounds=3)
    with federation.draws.default_generators("weights"):
        first = federation.prototype.build(federation.clients[0].spec).learner.state_dict()
    for state in [*heads(short), *heads(federation)]:
        assert_equal(state, {name: first[f"{name}"] for name in state})
    assert not any(".head." in name for name in federation.clients[0].upload())
    assert not torch.equal(weights(short)[0]["backbone.body.0.weight"], first["backbone.body.0.weight"])


@pytest.mark.seconds
def test_with_a_head_that_trains_it_is_fedper():
    class Thawed(FedBABU):
        def configure_learner(self):
            super().configure_learner()
            self.learner.requires_grad_(True)

    options = {"rounds": 3, "local_epochs": 2}
    a = run(client(Thawed, weighting="samples"), **options)
    b = run(client(FedPer), **options)
    assert_equal(weights(a), weights(b))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fine_tuning_is_gradient_descent_and_is_put_back(momentum):
    def flat_body(channels, classes):
        return Parts(nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), nn.Linear(64, classes))

    tuning = {"finetune": "head", "finetune_epochs": 3, "finetune_lr": 0.5, "finetune_momentum": momentum}
    method = client(FedBABU, backbone=flat_body, **tuning)
    federation = run(method, digits(2, batch_size=2000), rounds=1)
    member, before = federation.clients[0], weights(federation)
    [(images, labels)] = in_order(federation.data.client(0).train)
    with torch.no_grad():
        features = member.backbone.body(images).double().numpy()
    problem = object.__new__(SoftmaxRegression)
    problem.data = [(features, np.eye(10)[labels.numpy()])]
    w = flat(member.learner.state_dict(), "backbone.head")
    velocity = np.zeros_like(w)
    for _ in range(3):
        velocity = momentum * velocity + problem.gradient(0, w)
        w = w - 0.5 * velocity
    with torch.inference_mode(), member.personalized() as learner:
        np.testing.assert_allclose(flat(learner.state_dict(), "backbone.head"), w, atol=1e-5)
        others = flat(federation.clients[1].learner.state_dict(), "backbone.head")
    np.testing.assert_array_equal(others, flat(before[1], "backbone.head"))  # though in the same memory
    assert_equal(weights(federation), before)


@pytest.mark.parametrize(("part", "moved"), [("all", {"body", "head"}), ("body", {"body"}), ("head", {"head"})])
def test_what_is_fine_tuned(part, moved):
    member = run(client(FedBABU, finetune=part, finetune_epochs=1), rounds=1).clients[0]
    before = {name: tensor.clone() for name, tensor in member.learner.state_dict().items()}
    with member.personalized() as learner:
        changed = {name.split(".")[1] for name, t in learner.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == moved


def test_without_fine_tuning_it_is_the_common_body_under_the_first_head():
    federation = run(client(FedBABU, finetune_epochs=0), rounds=2, evaluate="after")
    before = weights(federation)
    with federation.clients[0].personalized() as learner:
        assert_equal(dict(learner.state_dict()), dict(federation.clients[0].learner.state_dict()))
    assert_equal(weights(federation), before)


def test_what_it_needs():
    with pytest.raises(ConfigError, match=r"^model\.backbone: FedBABU trains a body"):
        run(client(FedBABU, backbone=lambda c, n: Parts(nn.Flatten(), nn.Linear(64, n))), rounds=1)
    with pytest.raises(ConfigError, match=r"^model\.head='nothing' is found"):
        run(client(FedBABU, backbone=TinyNet, head="nothing"), rounds=1)
