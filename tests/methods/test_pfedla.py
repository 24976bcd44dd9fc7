"""pFedLA against its formulas."""

import numpy as np
import pytest
import torch

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.methods import PFedLA, StandAlone
from lit_pfl.methods.similarity.pfedla import LayerWeights, PFedLAServer
from lit_pfl.testing import assert_equal
from tiny import client, digits, run, weights

NAMES = ("a.weight", "a.bias", "b.weight")


def server(clients=3, lr=0.05):
    made = PFedLAServer(frozenset(NAMES), PFedLA(hidden_dim=8, embedding_dim=4, server_lr=lr), seed=1)
    first = Payload({name: torch.randn(2, 3) for name in NAMES})
    made.start({k: ClientInfo(5, first) for k in range(clients)})
    return made


def drawn(clients=3):
    return {k: Payload({name: torch.randn(2, 3) for name in NAMES}) for k in range(clients)}


def mixed(made, k, models):
    a = made.weights_of(k).detach().numpy()
    of = {"a.weight": 0, "a.bias": 0, "b.weight": 1}
    return {name: sum(a[of[name], j] * models[j][name].numpy() for j in models) for name in NAMES}


def test_replies_are_mixed_layer_by_layer():
    made, models = server(), drawn()
    made.aggregate(1, models)
    for k in models:
        a = made.weights_of(k)
        assert a.shape == (2, 3)
        torch.testing.assert_close(a.sum(1), torch.ones(2))
        for name, expected in mixed(made, k, models).items():
            np.testing.assert_allclose(made.reply(k)[name], expected, atol=1e-5)


def test_the_step_is_against_the_gradient_of_the_distance_to_what_was_trained():
    made, models, trained = server(), drawn(), drawn()
    made.aggregate(1, models)
    before = {k: {name: x.clone() for name, x in made.module[k].named_parameters()} for k in models}

    def half(k):
        a, of = made.weights_of(k), {"a.weight": 0, "a.bias": 0, "b.weight": 1}
        theta = {name: sum(a[of[name], j] * models[j][name] for j in models) for name in NAMES}
        return sum((theta[name] - trained[k][name]).square().sum() / 2 for name in NAMES)

    gradients = {k: torch.autograd.grad(half(k), list(made.module[k].parameters())) for k in (0, 2)}
    distances = {k: float(half(k).detach()) for k in (0, 2)}
    made.aggregate(2, {k: trained[k] for k in (0, 2)})
    for k, module in enumerate(made.module):
        for i, (name, x) in enumerate(module.named_parameters()):
            expected = before[k][name] - (0.05 * gradients[k][i] if k in gradients else 0)
            torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-4)
    assert any(float(half(k).detach()) < distances[k] for k in (0, 2))


def test_where_all_weights_are_zero_the_own_layer_stays():
    made, models = server(), drawn()
    made.aggregate(1, models)
    with torch.no_grad():
        made.module[1].heads[0].weight.zero_()
        made.module[1].heads[0].bias.fill_(-1)
    assert made.weights_of(1)[0].tolist() == [0, 1, 0]
    torch.testing.assert_close(made.reply(1)["a.weight"], models[1]["a.weight"])
    assert LayerWeights(3, 4, 5, 2)().shape == (2, 5)


@pytest.mark.seconds
def test_with_all_weight_on_the_own_model_it_is_stand_alone(monkeypatch):
    def own(self, client):
        return torch.eye(len(self.places))[self.places[client]].expand(len(self.layers), -1).clone().requires_grad_()

    monkeypatch.setattr(PFedLAServer, "weights_of", own)
    a, b = (run(client(method), digits(3), rounds=3) for method in (PFedLA, StandAlone))
    assert_equal(weights(a), weights(b))
