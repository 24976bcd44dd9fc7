"""FedADMM against its formula."""

import numpy as np
import pytest
from quadratic import Quadratics, chosen, equal, flat, quadratic

from lit_pfl.core import ServerMomentum
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedADMM
from lit_pfl.nn.factorization import Factorization
from tiny import client, run, spec


def by_the_formula(problem, participants, rho, start, epochs, eta=1.0):
    theta, duals, own = problem.start, np.zeros((4, 3)), {}
    for ids in participants:
        changes = []
        for k in ids:
            first = own.get(k, problem.start) if start == "own" else theta
            w, before = first, duals[k].copy()
            for _ in range(epochs):
                w = w - 0.1 * (problem.gradient(k, w) + duals[k] + rho * (w - theta))
            duals[k] += rho * (w - theta)
            changes.append(w - first + (duals[k] - before) / rho)
            own[k] = w
        theta = theta + eta * np.mean(changes, axis=0)
    return theta, duals


@pytest.mark.parametrize("eta", [1.0, 0.5])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("start", ["own", "global"])
def test_rounds_equal_the_formula(start, participation, eta):
    problem = Quadratics.random()
    server = None if eta == 1 else ServerMomentum(eta, 0.0)
    method = quadratic(FedADMM, problem, rho=0.5, start=start, server_optimizer=server)
    federation = run(method, equal(4), rounds=4, local_epochs=3, participation=participation)
    theta, duals = by_the_formula(problem, chosen(federation, 4), 0.5, start, 3, eta)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), theta, rtol=1e-9)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(flat(dict(member.dual.items())), duals[k], rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_it_comes_to_rest_at_the_optimum_where_duals_are_gradients():
    problem = Quadratics.random()
    federation = run(quadratic(FedADMM, problem, rho=1.0), equal(4), rounds=60, local_epochs=10)
    end = flat(federation.coordinator.server.model)
    np.testing.assert_allclose(end, problem.optimum(np.full(4, 0.25)), atol=1e-4)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(flat(dict(member.dual.items())), -problem.gradient(k, end), atol=1e-3)


@pytest.mark.seconds
def test_with_few_clients_a_round_it_comes_to_rest_there_too():
    """Clients that take part late begin from the initial weights, so theta stays the mean of all u_i."""
    problem, rho = Quadratics.random(), 1.0
    method = quadratic(FedADMM, problem, rho=rho, server_optimizer=ServerMomentum(0.5, 0.0))
    federation = run(method, equal(4), rounds=60, local_epochs=10, participation=0.5)
    assert set(federation.participants(0)) | set(federation.participants(1)) != {0, 1, 2, 3}  # client 3 is late
    end = flat(federation.coordinator.server.model)
    members = federation.clients.values()
    u = [flat(dict(one.own.items())) + flat(dict(one.dual.items())) / rho for one in members]
    np.testing.assert_allclose(end, np.mean(u, axis=0), atol=1e-12)
    np.testing.assert_allclose(end, problem.optimum(np.full(4, 0.25)), atol=1e-3)


@pytest.mark.parametrize("alone", [False, True])
def test_a_client_alone_takes_what_it_receives_first_for_the_initial_weights(alone):
    problem = Quadratics.random()
    member = run(quadratic(FedADMM, problem), equal(4), rounds=1).prototype.build(spec())
    member.configure(member.spec, alone=alone)
    reply = {name: tensor + 1 for name, tensor in member.upload().items()}
    member.download(reply)
    member.begin_round()
    np.testing.assert_allclose(flat(member.learner.state_dict()), problem.start + alone)


def test_factorized_weights_are_refused():
    with pytest.raises(ConfigError, match=r"^model\.factorization: FedADMM"):
        run(client(FedADMM, factorization=Factorization()), rounds=1)


def test_it_sends_as_much_as_fedavg():
    federation = run(client(FedADMM), rounds=2)
    assert set(federation.clients[0].upload()) == set(federation.coordinator.server.reply(0))
    assert federation.traffic.up == federation.traffic.down
