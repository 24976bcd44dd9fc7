"""FedDyn against its formulas, and where it ends."""

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

from lit_pfl import Federation
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedDyn
from lit_pfl.methods.global_model.feddyn import ALPHA
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run, step_schedule, trainer

THRESHOLD = 0.02


def by_the_formulas(
    problem, n, participants, steps, alpha, lr=0.1, epochs=5, by_samples=False, decay=0.0, clip=np.inf, gamma=1.0
):
    """Algorithm 1 with its gradients: the model, and the gradient of L_i that each client keeps.

    The server's h is theirs, ``h <- h - alpha / m sum (w_i - w)``, and the model ``mean w_i - h / alpha``.
    """
    w, m = problem.start, len(n)
    kept, h, trained = np.zeros((m, len(w))), np.zeros_like(w), [0] * m
    strengths = alpha * np.mean(n) / n if by_samples else np.full(m, alpha)
    for ids in participants:
        ends = []
        for k in ids:
            x = w
            for _ in range(epochs):
                for _ in range(steps[k]):
                    along = problem.gradient(k, x) - kept[k] + strengths[k] * (x - w)
                    along = along * min(1, clip / (np.linalg.norm(along) + 1e-6))
                    x = x - lr * gamma ** (trained[k] // 2) * (along + decay * x)
                trained[k] += 1
            kept[k] = kept[k] - strengths[k] * (x - w)
            ends.append(x)
        h = h - alpha / m * np.sum([x - w for x in ends], axis=0)
        w = np.mean(ends, axis=0) - h / alpha
    return w, kept


def kept_gradients(federation, alpha) -> np.ndarray:
    return -alpha * np.stack([flat(dict(member.deviation.items())) for member in federation.clients.values()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.1},
        {"clip": 0.5},
        {"gamma": 0.5, "batch_size": 100},
        {"gamma": 0.5, "batch_size": 100, "decay": 0.1, "clip": 0.5},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize(("alpha", "participation"), [(0.5, 1.0), (2.0, 0.5)])
def test_updates_equal_the_formulas(options, alpha, participation):
    problem, rest = Quadratics.random(), dict(options)
    batch_size = rest.pop("batch_size", 2000)
    method = quadratic(
        FedDyn,
        problem,
        optimizer=sgd(0.1, weight_decay=rest.get("decay", 0.0)),
        scheduler=step_schedule if "gamma" in rest else None,
        alpha=alpha,
    )
    federation = run(
        method, unequal(batch_size=batch_size), rounds=4, local_epochs=5, participation=participation,
        client_trainer={"gradient_clip_val": rest.get("clip")},
    )  # fmt: skip
    steps = [len(federation.data.client(k).train) for k in federation.clients]
    assert (max(steps) > 1) == (batch_size == 100)
    w, kept = by_the_formulas(problem, sizes(federation), chosen(federation, 4), steps, alpha, **rest)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, rtol=1e-9)
    np.testing.assert_allclose(kept_gradients(federation, alpha), kept, rtol=1e-9, atol=1e-12)


def test_updates_by_samples_equal_the_formulas():
    problem = Quadratics.random()
    federation = run(quadratic(FedDyn, problem, alpha=1.0, by_samples=True), unequal(), rounds=4, local_epochs=5)
    w, _ = by_the_formulas(problem, sizes(federation), chosen(federation, 4), [1] * 4, 1.0, by_samples=True)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, atol=1e-6)  # alpha_i travels in float32


def test_updates_on_digits_equal_the_formulas():
    federation = run(softmax_regression(FedDyn, alpha=0.1), unequal(), rounds=4, local_epochs=3, participation=0.75)
    problem = SoftmaxRegression(federation)
    w, kept = by_the_formulas(problem, sizes(federation), chosen(federation, 4), [1] * 4, 0.1, epochs=3)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, atol=1e-5)
    np.testing.assert_allclose(kept_gradients(federation, 0.1), kept, atol=1e-6)


@pytest.mark.seconds
def test_it_reaches_the_optimum_where_averaging_ends_elsewhere():
    """How far averaging stays from it, and that it does: test_scaffold.py."""
    problem, shares = Quadratics.random(), np.full(4, 0.25)
    federation = run(quadratic(FedDyn, problem, alpha=2.0), equal(4, batches=5), rounds=20)
    end, optimum = flat(federation.coordinator.server.model), problem.optimum(shares)
    np.testing.assert_allclose(end, optimum, atol=1e-4)
    assert np.linalg.norm(optimum - problem.fixed_point_of_averaging(shares, lr=0.1, steps=5)) > 0.2
    np.testing.assert_allclose(kept_gradients(federation, 2.0), [problem.gradient(k, end) for k in range(4)], atol=1e-3)


@pytest.mark.seconds
def test_counted_by_samples_it_reaches_the_optimum_of_all_samples():
    problem = Quadratics.random()
    federation = run(quadratic(FedDyn, problem, alpha=2.0, by_samples=True), unequal(), rounds=20, local_epochs=5)
    n, end = sizes(federation), flat(federation.coordinator.server.model)
    np.testing.assert_allclose(end, problem.optimum(n / n.sum()), atol=1e-4)
    assert np.linalg.norm(end - problem.optimum(np.full(4, 0.25))) > 1e-2


@pytest.mark.seconds
@pytest.mark.parametrize(("below", "apart"), [("send", 1e-6), ("keep", 2 * THRESHOLD)])
def test_both_sides_keep_the_same_deviation_of_a_sparse_mu(below, apart):
    """What a client keeps at home, now and when it joined, the server does not know; neither is above the threshold."""
    factorization = Factorization(form="FFxIO", threshold=THRESHOLD, below_threshold=below)
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            kept, members = pl_module.coordinator.server.deviation, pl_module.clients.values()
            means = {name: sum(member.deviation[name] for member in members) / len(members) for name in kept}
            seen.append(max(float((kept[name] - mean).abs().max()) for name, mean in means.items()))

    federation = Federation(client(FedDyn, alpha=0.1, factorization=factorization), seed=3, threads=1, participation=2)
    trainer(8, callbacks=[Watch()]).fit(federation, datamodule=digits(3))
    assert max(seen) < apart
    small = [layer.unsent_mu.count_nonzero() for _, layer in factorized_layers(federation.clients[0].learner)]
    assert any(small)  # there was something to lose


@pytest.mark.seconds
def test_with_partial_participation_too():
    problem = Quadratics.random()
    federation = run(quadratic(FedDyn, problem, alpha=2.0), equal(4, batches=5), rounds=40, participation=0.5)
    end = flat(federation.coordinator.server.model)
    np.testing.assert_allclose(end, problem.optimum(np.full(4, 0.25)), atol=1e-3)


@pytest.mark.seconds
def test_traffic_is_that_of_fedavg():
    a, b, c = (
        run(client(method, **options), rounds=3, participation=0.5)
        for method, options in [(FedDyn, {}), (FedAvg, {}), (FedDyn, {"by_samples": True})]
    )
    assert a.traffic.state_dict() == b.traffic.state_dict()
    assert c.traffic.elements == a.traffic.elements + 3 * 2  # every participant is told its alpha
    assert c.coordinator.server.reply(0)[ALPHA].shape == ()


def test_the_reported_loss_is_that_of_the_model():
    federation = run(client(FedDyn, alpha=0.01), rounds=3)
    member = federation.clients[1]
    member.download(federation.coordinator.server.reply(1))
    images, labels = next(iter(federation.data.client(1).val))
    member.start_epoch(0, 1)
    member.eval()
    with torch.no_grad():
        member.backbone.head.bias += 1
    plain = torch.nn.functional.cross_entropy(member(images), labels)
    torch.testing.assert_close(member.objective((images, labels), 0), plain)
    assert float(sum(h.square().sum() for _, h in member.deviation.items())) > 1e-3


def test_the_mean_of_the_participants_is_scored_if_asked_to():
    federations = {}
    for scored in ("next", "mean"):
        method = quadratic(FedDyn, Quadratics.random(), alpha=2.0, scored_model=scored)
        federations[scored] = run(method, equal(4), rounds=3, participation=0.5, evaluate="after")
    a, b = (federations[scored].coordinator.server for scored in ("next", "mean"))
    assert_equal(dict(a.model), dict(b.model))  # what is scored changes nothing
    assert a.evaluation_reply(0) is a.model
    moved = np.mean(
        [flat(federations["mean"].clients[k].upload()) for k in federations["mean"].participants(2)], axis=0
    )
    np.testing.assert_allclose(flat(b.evaluation_reply(0)), moved, atol=1e-6)
    np.testing.assert_allclose(flat(b.global_model()), moved, atol=1e-6)
    assert np.abs(flat(a.model) - moved).max() > 1e-3
    alone = federations["mean"].standalone(0)
    np.testing.assert_allclose(flat(dict(alone.named_parameters())), moved, atol=1e-6)


def test_alpha_must_be_above_zero():
    with pytest.raises(ConfigError, match=r"model\.alpha=0"):
        FedDyn(alpha=0.0)
