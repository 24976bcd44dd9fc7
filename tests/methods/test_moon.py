"""MOON against its formula."""

import math

import numpy as np
import pytest
import torch
from heads import skewed

from lit_pfl.methods import MOON, FedAvg
from lit_pfl.methods.global_model.moon import contrast
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, client, run


@pytest.mark.seconds
def test_the_first_round_is_fedavg_s_and_the_second_is_not():
    def shared(method, rounds):
        return run(client(method), skewed(), rounds=rounds).coordinator.server.model["backbone.head.weight"]

    assert torch.equal(shared(MOON, 1), shared(FedAvg, 1))
    assert not torch.equal(shared(MOON, 2), shared(FedAvg, 2))


def test_the_term_equals_the_formula():
    rng = np.random.default_rng(0)
    q, near, away = rng.normal(size=(3, 5, 4))

    def cos(a, b):
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    up, down = np.exp(cos(q, near) / 0.5), np.exp(cos(q, away) / 0.5)
    value = contrast(*map(torch.tensor, (q, near, away)), tau=0.5)
    assert float(value) == pytest.approx(-np.log(up / (up + down)).mean())


def test_with_the_received_network_as_the_last_one_there_is_no_gradient():
    q, near = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    value = contrast(q, near, near, 0.5)
    value.backward()
    assert float(value) == pytest.approx(math.log(2))
    assert float(q.grad.abs().max()) < 1e-15


def test_an_objective_is_the_loss_and_the_term_with_both_networks_frozen():
    member = run(client(MOON, mu=3.0), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    before = {name: tensor.clone() for name, tensor in tensors_of(member.learner).items()}
    member.begin_round()
    with torch.no_grad():
        for weight in member.learner.parameters():
            weight += 0.05 * torch.randn_like(weight)
    member.eval()

    def q(state):
        with torch.no_grad():
            now = {name: tensor.clone() for name, tensor in tensors_of(member.learner).items()}
            member.learner.load_state_dict(state)
            made = member.backbone.body(images)
            member.learner.load_state_dict(now)
        return made

    last = q(dict(member.previous.items()))
    received = q(before)
    expected = torch.nn.functional.cross_entropy(member.backbone(images), labels) + 3 * contrast(
        member.backbone.body(images), received, last, 0.5
    )
    torch.testing.assert_close(member.objective((images, labels), 0), expected)
    member.end_round()
    assert_equal(dict(member.previous.items()), tensors_of(member.learner))


def test_running_statistics_follow_the_trained_network_only():
    member = run(client(MOON), skewed(), rounds=2).clients[0]
    member.train()
    member.begin_round()
    batches = member.backbone.body[1].num_batches_tracked.clone()
    member.objective(next(iter(member.data.train)), 0)
    assert member.backbone.body[1].num_batches_tracked == batches + 1
