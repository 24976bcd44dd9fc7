"""Optimizers of the server against their formulas, under FedAvg and other methods that average."""

import numpy as np
import pytest
import torch
from quadratic import Quadratics, chosen, equal, flat, quadratic, sgd, sizes, unequal

from lit_pfl.cli import main
from lit_pfl.core import ServerAdam, ServerExtrapolation, ServerMomentum
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError
from lit_pfl.methods import (
    AgnosticFL,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedExP,
    FedPer,
    FedProx,
    FedYogi,
    Scaffold,
    SimFed,
)
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run


def momentum(lr, nesterov=False):
    def step(w, went, kept):
        m = kept["m"] = 0.9 * kept.get("m", 0) + went
        return w + lr * (went + 0.9 * m if nesterov else m)

    return step


def adaptive(second, beta1=0.9):
    def step(w, went, kept):
        m = kept["m"] = beta1 * kept.get("m", 0) + (1 - beta1) * went
        v = kept["v"] = second(kept.get("v", 1e-6), went**2)
        return w + 0.1 * m / (np.sqrt(v) + 1e-3)

    return step


RULES = {
    "FedAvgM": (FedAvgM, {}, momentum(1.0)),
    "with another rate": (FedAvg, {"server_optimizer": ServerMomentum(lr=0.5)}, momentum(0.5)),
    "Nesterov": (FedAvg, {"server_optimizer": ServerMomentum(lr=0.5, nesterov=True)}, momentum(0.5, nesterov=True)),
    "FedAdagrad": (FedAdagrad, {}, adaptive(lambda v, d: v + d, beta1=0.0)),
    "FedAdam": (FedAdam, {}, adaptive(lambda v, d: 0.99 * v + 0.01 * d)),
    "FedYogi": (FedYogi, {}, adaptive(lambda v, d: v - 0.01 * d * np.sign(v - d))),
}


def local(problem, k, w, mu=0.0, lr=0.1, epochs=3):
    x = w
    for _ in range(epochs):
        x = x - lr * (problem.gradient(k, x) + mu * (x - w))
    return x


def by_the_formula(problem, n, participants, step, mu=0.0):
    w, kept = problem.start, {}
    for ids in participants:
        mean = np.average([local(problem, k, w, mu) for k in ids], axis=0, weights=n[ids])
        w = step(w, mean - w, kept)
    return w


@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_formula(rule):
    (kind, options, step), problem = RULES[rule], Quadratics.random()
    federation = run(quadratic(kind, problem, **options), unequal(), rounds=5, local_epochs=3, participation=0.5)
    expected = by_the_formula(problem, sizes(federation), chosen(federation, 5), step)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, rtol=1e-10)


def test_fedprox_with_the_server_of_fedadam():
    problem = Quadratics.random()
    method = quadratic(FedProx, problem, mu=1.0, server_optimizer=ServerAdam())
    federation = run(method, unequal(), rounds=4, local_epochs=3)
    step = RULES["FedAdam"][2]
    expected = by_the_formula(problem, sizes(federation), chosen(federation, 4), step, mu=1.0)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, rtol=1e-10)


def test_a_body_is_stepped_and_a_head_that_stays_is_not():
    federation = run(client(FedPer, server_optimizer=ServerMomentum(momentum=0.9)), digits(3), rounds=2)
    names = federation.coordinator.server.server_optimizer.state["momentum"]
    assert names.keys() == set(federation.clients[0].upload())
    assert not any(".head." in name for name in names)


def test_running_statistics_are_averaged_and_no_more():
    federation = run(client(FedAdam, norm_stats="averaged"), equal(2), rounds=2)
    model = federation.coordinator.server.model
    for name in ("running_mean", "running_var"):
        every = [c.learner.get_buffer(f"backbone.body.1.{name}") for c in federation.clients.values()]
        torch.testing.assert_close(model[f"backbone.body.1.{name}"], torch.stack(every).mean(0))
    assert not any("running" in name for name in federation.coordinator.server.server_optimizer.state["m"])


# ------------------------------------------------------------------------------- FedExP


def server(optimizer):
    server, first = Server(), Payload({"a": torch.zeros(2), "b": torch.zeros(2), "n": torch.zeros(1)})
    server.start({k: ClientInfo(1, first) for k in range(4)})
    server.step_by(optimizer, ["a", "b"])
    return server


def uploads(*points):
    return {
        k: Payload({"a": torch.tensor(p[:2]).float(), "b": torch.tensor(p[2:]).float(), "n": torch.tensor([float(k)])})
        for k, p in enumerate(points)
    }


def test_orthogonal_ways_are_half_as_long_as_there_are_clients():
    apart = server(ServerExtrapolation(eps=0.0))
    apart.aggregate(1, uploads([1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]))
    assert torch.equal(apart.model["a"], torch.full((2,), 0.5))  # eta = 4 / 2, the mean is 1 / 4
    assert apart.model["n"] == 1.5
    assert torch.equal(apart.global_model()["b"], torch.full((2,), 0.5))  # as in the authors' code after round 1
    apart.aggregate(2, uploads(*[[1.5, 1.5, 1.5, 1.5]] * 4))
    assert torch.equal(apart.model["a"], torch.full((2,), 1.5))
    assert torch.equal(apart.global_model()["b"], torch.full((2,), 1.0))  # the mean of 0.5 and that
    assert apart.global_model()["n"] == 1.5


def test_equal_ways_are_plain_averaging():
    points = [[0.3, 0.1, -0.7, 0.2]] * 4
    same, plain = server(ServerExtrapolation(shows_mean=False)), Server()
    plain.start({k: ClientInfo(1, same.model) for k in range(4)})
    for round in (1, 2):  # after the first one no former model is shown in any case
        for one in (same, plain):
            one.aggregate(round, uploads(*[[round * x for x in point] for point in points]))
        assert_equal(dict(same.model), dict(plain.model))
        assert_equal(dict(same.global_model()), dict(plain.global_model()))


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_the_rate_does_not_depend_on_the_scale_without_eps(scale):
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(3, 4, generator=draw, dtype=torch.float64)

    def rate(points):
        before, mean = {"w": torch.zeros(4, dtype=torch.float64)}, {"w": points.mean(0)}
        return ServerExtrapolation(eps=0.0).rate(before, mean, [Payload({"w": p}) for p in points], [1 / 3] * 3)

    assert rate(points) > 1
    assert rate(points) == pytest.approx(rate(scale * points))


def test_fedexp_equals_the_formula_and_shows_the_mean_of_two_models():
    problem = Quadratics.random()
    federation = run(quadratic(FedExP, problem, eps=1e-3), unequal(), rounds=4, local_epochs=3)
    n, models = sizes(federation), [problem.start]
    for _ in range(4):
        ways = np.stack([local(problem, k, models[-1]) - models[-1] for k in range(4)])
        mean = np.average(ways, axis=0, weights=n)
        eta = max(1, np.average((ways**2).sum(1), weights=n) / (2 * ((mean**2).sum() + 1e-3)))
        models.append(models[-1] + eta * mean)
    end = federation.coordinator.server
    np.testing.assert_allclose(flat(end.model), models[-1], rtol=1e-10)
    np.testing.assert_allclose(flat(end.evaluation_reply(0)), (models[-1] + models[-2]) / 2, rtol=1e-10)


# ------------------------------------------------------------------------------- what is held


@pytest.mark.parametrize("kind", [SimFed, Scaffold, AgnosticFL])
def test_servers_with_a_step_of_their_own_refuse(kind):
    options = {"optimizer": sgd(0.1), "server_optimizer": ServerAdam()}
    if kind is SimFed:
        options["factorization"] = None
    with pytest.raises(ConfigError, match=rf"^model\.server_optimizer: {kind.__name__}Server has a step of its own"):
        run(client(kind, **options), rounds=1)


def test_factorized_weights_are_refused():
    with pytest.raises(ConfigError, match=r"^model\.server_optimizer needs dense weights"):
        run(client(FedAvg, server_optimizer=ServerAdam(), factorization=Factorization()), rounds=1)


@pytest.mark.seconds
def test_two_federations_of_one_prototype_share_no_state():
    method = client(FedAdam)
    a, b = run(method), run(method)
    assert_equal(a.coordinator.state_dict(), b.coordinator.state_dict())
    assert not method.server_optimizer.state


@pytest.mark.seconds
def test_on_the_command_line(tmp_path):
    words = {"model": "FedProx", "model.server_optimizer": "ServerYogi", "model.server_optimizer.lr": "0.02",
             "data": "Digits", "data.num_clients": 2, "data.train_fraction": 0.05, "data.test_fraction": 0.9,
             "trainer.max_epochs": 1, "trainer.accelerator": "cpu"}  # fmt: skip
    main(["fit", "--folder", str(tmp_path / "run"), *(f"--{name}={value}" for name, value in words.items())])
    assert "ServerYogi" in (tmp_path / "run" / "config.yaml").read_text()
