"""FedNova against its formula."""

import numpy as np
import pytest
import torch
from quadratic import (
    Quadratics,
    chosen,
    equal,
    flat,
    quadratic,
    sgd,
    sizes,
    unequal,
)  # fmt: skip

from lit_pfl.core import ServerMomentum
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedNova
from lit_pfl.methods.global_model.fednova import STEPS, FedNovaServer
from tiny import assert_equal, client, run, weights


def by_the_formula(problem, n, batch_size, participants, rho, epochs, gmf=0.0):
    w, m = problem.start, 0.0
    for ids in participants:
        ways, a = [], []
        for k in ids:
            x, buffer, c, total = w, 0.0, 0.0, 0.0
            for _ in range(epochs * -(-n[k] // batch_size)):
                buffer = rho * buffer + problem.gradient(k, x)
                x = x - 0.05 * buffer
                c = rho * c + 1
                total += c
            ways.append((w - x) / total)
            a.append(total)
        p = n[ids] / n[ids].sum()
        m = gmf * m - (p @ a) * (p @ np.stack(ways))
        w = w + m
    return w


@pytest.mark.parametrize("gmf", [0.0, 0.5])
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_rounds_equal_the_formula(rho, gmf):
    problem, server = Quadratics.random(), ServerMomentum(momentum=gmf) if gmf else None
    method = quadratic(FedNova, problem, optimizer=sgd(0.05, momentum=rho), server_optimizer=server)
    federation = run(method, unequal(batch_size=100), rounds=3, local_epochs=2, participation=0.75)
    n = sizes(federation)
    expected = by_the_formula(problem, n, 100, chosen(federation, 3), rho, 2, gmf)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), expected, rtol=1e-10)
    assert len(set(-(-n // 100))) > 1


@pytest.mark.seconds
def test_equally_many_steps_are_fedavg_bit_for_bit():
    options = {"optimizer": sgd(0.1, momentum=0.9), "norm_stats": "averaged", "reset_optimizer": True}
    a, b = (run(client(kind, **options), equal(4), rounds=3, local_epochs=2) for kind in (FedNova, FedAvg))
    assert_equal(weights(a), weights(b))
    assert a.traffic.elements == b.traffic.elements + 3 * 4  # a_i


@pytest.mark.seconds
def test_the_count_of_steps_is_no_part_of_an_update():
    federation = run(client(FedNova, optimizer=sgd(0.1)), equal(4), rounds=2, local_epochs=2, max_update_norm=5)
    plain = run(client(FedNova, optimizer=sgd(0.1)), equal(4), rounds=2, local_epochs=2)
    assert not federation.refused
    assert_equal(weights(federation), weights(plain))


def test_one_step_and_three_along_constant_gradients():
    server, first = FedNovaServer(frozenset("w")), Payload({"w": torch.zeros(2), "s": torch.zeros(1)})
    server.start({k: ClientInfo(5, first) for k in range(2)})
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    server.aggregate(1, {
        k: Payload({"w": -0.1 * steps * g[k], "s": torch.tensor([float(steps)]), STEPS: torch.tensor(float(steps))})
        for k, steps in enumerate([1, 3])
    })  # fmt: skip
    torch.testing.assert_close(server.model["w"], -0.1 * (g[0] + g[1]))
    assert server.model["s"] == 2  # no weight: averaged only
    server.aggregate(2, {
        k: Payload({"w": server.model["w"], "s": torch.zeros(1), STEPS: torch.tensor(steps)})
        for k, steps in enumerate([0.0, 3.0])
    })  # fmt: skip
    torch.testing.assert_close(server.model["w"], -0.1 * (g[0] + g[1]))  # nobody has moved


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adam, sgd(0.1, momentum=0.9, nesterov=True), sgd(0.1, momentum=0.9, dampening=0.5)],
)
def test_only_sgd(optimizer):
    with pytest.raises(ConfigError, match=r"^model\.optimizer: FedNova divides"):
        run(client(FedNova, optimizer=optimizer), rounds=1)


def test_momentum_that_is_kept_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.reset_optimizer=false: FedNova counts"):
        run(client(FedNova, reset_optimizer=False), rounds=1)
