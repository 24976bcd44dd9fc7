"""SCAFFOLD against its formulas, and where it ends."""

import lightning as L
import numpy as np
import pytest
import torch
from quadratic import (
    Quadratics,
    SoftmaxRegression,
    chosen,
    equal,
    flat,
    quadratic,
    sgd,
    sizes,
    softmax_regression,
    unequal,
)
from torch import nn

from lit_pfl import Payload
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.robust import RobustMean
from lit_pfl.core.server import ClientInfo
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, Scaffold
from lit_pfl.methods.global_model.scaffold import CONTROL, ScaffoldServer
from tiny import assert_equal, client, run, step_schedule


def by_the_formulas(
    problem, n, participants, steps, lr=0.1, epochs=5, server_lr=1.0, by_samples=False, decay=0.0, clip=np.inf,
    gamma=1.0,
):  # fmt: skip
    """Algorithm 1, option II: the model, c and all c_i. ``steps`` per epoch of each client; gamma every two epochs."""
    w, clients = problem.start, range(len(n))
    c, ci, trained = np.zeros_like(w), np.zeros((len(n), len(w))), [0 for _ in clients]
    for ids in participants:
        ends, changes = [], []
        for k in ids:
            nu = n[k] / np.mean(n) if by_samples else 1.0
            x, rates = w, []
            for _ in range(epochs):
                rates += [lr * gamma ** (trained[k] // 2)] * steps[k]
                trained[k] += 1
            for rate in rates:
                along = problem.gradient(k, x) - ci[k] + c / nu
                x = x - rate * (along * min(1, clip / (np.linalg.norm(along) + 1e-6)) + decay * x)
            new = ci[k] - c / nu + (w - x) / sum(rates)
            changes.append(nu * (new - ci[k]))
            ends.append(x)
            ci[k] = new
        w = w + server_lr * np.mean([x - w for x in ends], axis=0)
        c = c + np.sum(changes, axis=0) / len(n)
    return w, c, ci


def controls(federation) -> np.ndarray:
    return np.stack([flat(dict(member.control.items())) for member in federation.clients.values()])


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"server_lr": 0.5},
        {"by_samples": True},
        {"decay": 0.1},
        {"clip": 0.5},
        {"gamma": 0.5, "batch_size": 100},
        {"gamma": 0.5, "batch_size": 100, "decay": 0.1, "clip": 0.5, "by_samples": True, "server_lr": 1.5},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_updates_equal_the_formulas(options, participation):
    problem, rest = Quadratics.random(), dict(options)
    batch_size = rest.pop("batch_size", 2000)
    method = quadratic(
        Scaffold,
        problem,
        optimizer=sgd(0.1, weight_decay=rest.get("decay", 0.0)),
        scheduler=step_schedule if "gamma" in rest else None,
        **{name: rest[name] for name in ("server_lr", "by_samples") if name in rest},
    )
    federation = run(
        method, unequal(batch_size=batch_size), rounds=4, local_epochs=5, participation=participation,
        client_trainer={"gradient_clip_val": rest.get("clip")},
    )  # fmt: skip
    steps = [len(federation.data.client(k).train) for k in federation.clients]
    assert (max(steps) > 1) == (batch_size == 100)
    w, c, ci = by_the_formulas(problem, sizes(federation), chosen(federation, 4), steps, **rest)
    server = federation.coordinator.server
    np.testing.assert_allclose(flat(server.model), w, rtol=1e-9)
    np.testing.assert_allclose(flat(server.control), c, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(controls(federation), ci, rtol=1e-9, atol=1e-12)


@pytest.mark.seconds
def test_updates_on_digits_equal_the_formulas():
    federation = run(softmax_regression(Scaffold), unequal(), rounds=4, local_epochs=3, participation=0.75)
    problem = SoftmaxRegression(federation)
    w, _, ci = by_the_formulas(problem, sizes(federation), chosen(federation, 4), [1] * 4, epochs=3)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, atol=1e-6)
    np.testing.assert_allclose(controls(federation), ci, atol=1e-5)


@pytest.mark.seconds
def test_the_first_round_is_fedavg_of_equal_weights_bit_for_bit():
    plain = {"optimizer": sgd(0.1, weight_decay=1e-3)}
    a = run(client(Scaffold, **plain), equal(), rounds=1, local_epochs=3)
    b = run(client(FedAvg, **plain), equal(), rounds=1, local_epochs=3)
    assert_equal(dict(a.coordinator.server.model), dict(b.coordinator.server.model))
    c, d = (run(client(m, **plain), equal(), rounds=2, local_epochs=3) for m in (Scaffold, FedAvg))
    assert not torch.equal(*(f.coordinator.server.model["backbone.head.bias"] for f in (c, d)))


@pytest.mark.seconds
def test_it_reaches_the_optimum_where_averaging_ends_elsewhere():
    problem, shares = Quadratics.random(), np.full(4, 0.25)

    class EqualFedAvg(FedAvg):
        def configure_server(self):
            return type("EqualServer", (ScaffoldServer,), {"reply": lambda self, client: self.model})()

    ends = {
        method: flat(run(quadratic(method, problem), equal(4, batches=5), rounds=20).coordinator.server.model)
        for method in (Scaffold, EqualFedAvg)
    }
    optimum, elsewhere = problem.optimum(shares), problem.fixed_point_of_averaging(shares, lr=0.1, steps=5)
    assert np.linalg.norm(optimum - elsewhere) > 0.2
    np.testing.assert_allclose(ends[EqualFedAvg], elsewhere, atol=1e-6)
    np.testing.assert_allclose(ends[Scaffold], optimum, atol=1e-6)


@pytest.mark.seconds
def test_counted_by_samples_it_reaches_the_optimum_of_all_samples():
    problem = Quadratics.random()
    federation = run(quadratic(Scaffold, problem, by_samples=True), unequal(), rounds=20, local_epochs=5)
    n = sizes(federation)
    end = flat(federation.coordinator.server.model)
    np.testing.assert_allclose(end, problem.optimum(n / n.sum()), atol=1e-6)
    assert np.linalg.norm(end - problem.optimum(np.full(4, 0.25))) > 1e-2


@pytest.mark.seconds
def test_with_partial_participation_too():
    problem = Quadratics.random()
    federation = run(quadratic(Scaffold, problem), equal(4, batches=5), rounds=40, participation=0.5)
    end = flat(federation.coordinator.server.model)
    np.testing.assert_allclose(end, problem.optimum(np.full(4, 0.25)), atol=1e-4)
    gradients = [problem.gradient(k, end) for k in range(4)]
    np.testing.assert_allclose(controls(federation), gradients, atol=1e-3)


def test_a_round_without_a_step_changes_nothing():
    def frozen(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)

    problem = Quadratics.random()
    federation = run(quadratic(Scaffold, problem, scheduler=frozen), equal(4), rounds=2)
    np.testing.assert_array_equal(flat(federation.coordinator.server.model), problem.start)
    assert not controls(federation).any()


@pytest.mark.seconds
def test_traffic_is_twice_that_of_fedavg():
    options = {"optimizer": sgd(0.1)}
    a, b = (run(client(method, **options), rounds=3, participation=0.5) for method in (Scaffold, FedAvg))
    assert a.traffic.elements == 2 * b.traffic.elements > 0
    upload, reply = a.clients[0].upload(), a.coordinator.server.reply(0)
    assert (a.traffic.up, a.traffic.down) == (2 * len(upload.to_bytes()), 2 * len(reply.to_bytes()))
    assert set(upload) == set(reply) == {*b.clients[0].upload(), *(CONTROL + name for name in b.clients[0].upload())}


def test_the_server_by_itself():
    """Two of three clients; every number is worked out by hand."""
    server = ScaffoldServer(server_lr=0.5, by_samples=True)
    first = Payload({"w": torch.tensor([1.0]), "s": torch.tensor([0.0]), CONTROL + "w": torch.tensor([0.0])})
    server.start({k: ClientInfo(n, first) for k, n in enumerate([10, 20, 30])})
    uploads = {
        k: Payload({"w": torch.tensor([w]), "s": torch.tensor([s]), CONTROL + "w": torch.tensor([change])})
        for k, w, s, change in [(0, 3.0, 2.0, 6.0), (2, 7.0, 4.0, 2.0)]
    }
    server.aggregate(1, uploads)
    assert server.model["w"] == 1 + 0.5 * ((3 + 7) / 2 - 1)
    assert server.model["s"] == 3  # not a weight: averaged only
    assert server.control["w"] == (0.5 * 6 + 1.5 * 2) / 3
    assert server.reply(0)[CONTROL + "w"] == 2 / 0.5
    assert server.reply(1)[CONTROL + "w"] == 2
    other = ScaffoldServer()
    other.start({k: ClientInfo(10, first) for k in range(3)})
    other.load_state_dict(server.state_dict())
    assert other.control["w"] == 2
    assert "s" not in other.control


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(0.1, momentum=0.9),
        sgd(0.1, maximize=True),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.SGD([{"params": [w], "lr": 0.1 / (i + 1)} for i, w in enumerate(p)]),
    ],
    ids=["momentum", "maximize", "adam", "several learning rates"],
)
def test_only_plain_sgd(optimizer):
    with pytest.raises(ConfigError, match=r"model\.optimizer"):
        run(client(Scaffold, optimizer=optimizer), rounds=1)


def test_a_rate_that_a_callback_adds_is_refused_when_it_is_there():
    class Adds(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(()))], "lr": 0.01})

    with pytest.raises(
        ConfigError, match=r"model\.optimizer: .* with one learning rate for all parameters, also later"
    ):
        run(client(Scaffold, optimizer=sgd(0.1)), rounds=2, client_trainer={"callbacks": Adds()})


@pytest.mark.seconds
def test_the_reported_loss_is_that_of_the_model():
    federation = run(client(Scaffold, optimizer=sgd(0.1)), rounds=3)
    member = federation.clients[1]
    member.download(federation.coordinator.server.reply(1))
    images, labels = next(iter(federation.data.client(1).val))
    member.begin_round()
    member.eval()
    with torch.no_grad():
        member.backbone.head.bias += 1
    torch.testing.assert_close(
        member.objective((images, labels), 0), torch.nn.functional.cross_entropy(member(images), labels)
    )


@pytest.mark.seconds
def test_control_variates_agree_in_mixed_precision():
    options = {"participation": 0.5, "rounds": 3, "client_trainer": {"precision": "bf16-mixed"}}
    federation = run(client(Scaffold, optimizer=sgd(0.1)), **options)
    np.testing.assert_allclose(controls(federation).mean(0), flat(federation.coordinator.server.control), atol=1e-6)


@pytest.mark.seconds
def test_a_robust_mean_of_some_clients_changes_controls_by_their_share_of_all():
    class Mean(RobustMean):
        """The plain one."""

        def __call__(self, uploads, weights, names, center):
            return weighted_mean(list(uploads.values()), weights, names)

    plain, robust = (
        run(client(Scaffold, optimizer=sgd(0.1), mean=mean), participation=0.5).coordinator.server.control
        for mean in (None, Mean())
    )
    assert any(control.any() for control in plain.values())
    torch.testing.assert_close(robust, plain)
