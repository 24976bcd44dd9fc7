"""IFCA: who chooses what, and what becomes of the models."""

import numpy as np
import pytest
import torch
from heads import Uniform
from quadratic import Quadratics, equal, flat, quadratic
from torch import nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.methods import IFCA
from lit_pfl.methods.similarity.ifca import CLUSTER, IFCAServer, by_number, draw_anew
from tiny import assert_equal, client, run, weights


@pytest.mark.seconds
def test_one_model_is_fedavg_with_equal_weights_bit_for_bit():
    a = run(client(IFCA, clusters=1), rounds=3, participation=0.5)
    b = run(client(Uniform), rounds=3, participation=0.5)
    for k, state in weights(b).items():
        assert_equal({name: tensor for name, tensor in weights(a)[k].items() if name != CLUSTER}, state)
    assert_equal(dict(a.coordinator.server.models[0]), dict(b.coordinator.server.model))


def opposite():
    """Clients 0 and 2 are drawn to one point, 1 and 3 to its opposite."""
    return Quadratics(np.stack([np.eye(3)] * 4), 20.0 * np.array([[1, 1, 1], [-1, -1, -1]] * 2))


@pytest.mark.seconds
def test_two_groups_find_their_models():
    federation = run(quadratic(IFCA, opposite(), clusters=2), equal(4), rounds=6, local_epochs=10)
    server = federation.coordinator.server
    assert server.chosen[0] == server.chosen[2] != server.chosen[1] == server.chosen[3]
    for k in range(4):
        np.testing.assert_allclose(flat(server.models[server.chosen[k]]), opposite().b[k], atol=0.2)
    ids, matrix = server.mixing()
    assert ids == [0, 1, 2, 3]
    assert torch.equal(matrix, torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]] * 2) / 2)


def test_a_round_equals_the_formula():
    problem = Quadratics.random()
    federation = run(quadratic(IFCA, problem, clusters=3), equal(4), rounds=1, local_epochs=3)
    one, start = federation.coordinator.server, run(quadratic(IFCA, problem, clusters=3), equal(4), rounds=0)
    firsts = [flat(model) for model in start.coordinator.server.models.values()]
    np.testing.assert_array_equal(firsts[0], problem.start)
    assert len({tuple(first) for first in firsts}) == 3
    chosen = {k: int(np.argmin([problem.loss(k, w) for w in firsts])) for k in range(4)}
    assert one.chosen == chosen
    for j, w in enumerate(firsts):
        ends = []
        for k in (k for k in chosen if chosen[k] == j):
            x = w
            for _ in range(3):
                x = x - 0.1 * problem.gradient(k, x)
            ends.append(x)
        np.testing.assert_allclose(flat(one.models[j]), np.mean(ends, axis=0) if ends else w, rtol=1e-12)


def test_a_model_that_nobody_chooses_stays():
    first = Payload({"w": torch.zeros(1), CLUSTER: torch.tensor(0)})
    server = IFCAServer([Payload({"w": torch.ones(1)})])
    server.start({k: ClientInfo(1, first) for k in range(2)})
    server.aggregate(1, {k: Payload({"w": torch.full((1,), 2.0 + k), CLUSTER: torch.tensor(0)}) for k in range(2)})
    assert [float(model["w"]) for model in server.models.values()] == [2.5, 1.0]


@pytest.mark.seconds
def test_all_models_come_down_and_one_goes_up():
    federation = run(client(IFCA, clusters=3), rounds=2)
    upload, reply = federation.clients[0].upload(), federation.coordinator.server.reply(0)
    models = by_number(reply)
    assert [set(model) for model in models.values()] == [set(upload) - {CLUSTER}] * 3
    assert reply.elements == 3 * (upload.elements - 1)
    norm, head = "backbone.body.1.weight", "backbone.head.weight"
    first = run(client(IFCA, clusters=3), rounds=0).coordinator.server.models
    assert all(torch.equal(model[norm], torch.ones(4)) for model in first.values())
    assert not torch.equal(first[1][head], first[2][head])


def test_frozen_weights_are_in_every_model_as_they_are():
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    draw_anew(layer)
    assert torch.equal(layer.weight, weight)
    assert not torch.equal(layer.bias, bias)
