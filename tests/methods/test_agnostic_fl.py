"""Agnostic federated learning against its formulas, and where it ends."""

import numpy as np
import pytest
import torch
from quadratic import (
    Quadratics,
    SoftmaxRegression,
    chosen,
    flat,
    quadratic,
    sizes,
    softmax_regression,
    unequal,
)

from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import BatchLoader, CropFlip
from lit_pfl.methods import AgnosticFL, FedAvg
from lit_pfl.methods.global_model.agnostic_fl import LOSS, AgnosticFLServer
from tiny import client, digits, run, step_schedule, weights


def projected(values: np.ndarray, total: float) -> np.ndarray:
    """Onto the simplex, by bisection."""
    low, high = values.min() - total, values.max()
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(values - theta, 0).sum() > total else (low, theta)
    return np.maximum(values - theta, 0)


def by_the_formulas(problem, n, participants, epochs, step, decay=1.0, lr=0.1) -> tuple[np.ndarray, np.ndarray]:
    """The model and lambda: both steps of a round are taken at what they were when it began."""
    w, lambdas = problem.start, n / n.sum()
    for t, ids in enumerate(participants):
        ends, losses = [], np.array([problem.loss(k, w) for k in ids])
        for k in ids:
            x = w
            for _ in range(epochs):
                x = x - lr * problem.gradient(k, x)
            ends.append(x)
        held = lambdas[ids]
        w = np.average(ends, axis=0, weights=held)
        lambdas = lambdas.copy()
        lambdas[ids] = projected(held + step * decay**t * losses, held.sum())
    return w, lambdas


def lambdas_of(federation) -> np.ndarray:
    return np.array(list(federation.coordinator.server.lambdas.values()))


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("options", [{"step": 0.02}, {"step": 0.03, "decay": 0.5}])
def test_updates_equal_the_formulas(options, participation):
    problem = Quadratics.random()
    federation = run(
        quadratic(AgnosticFL, problem, **options), unequal(), rounds=5, local_epochs=3, participation=participation
    )
    n = sizes(federation)
    w, lambdas = by_the_formulas(problem, n, chosen(federation, 5), 3, **options)
    np.testing.assert_allclose(lambdas_of(federation), lambdas, atol=1e-7)  # losses travel in float32
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, atol=1e-6)
    assert np.abs(lambdas - n / n.sum()).max() > 0.05


def test_updates_on_digits_equal_the_formulas():
    federation = run(softmax_regression(AgnosticFL), unequal(), rounds=4, local_epochs=2, participation=0.75)
    problem = SoftmaxRegression(federation)
    w, lambdas = by_the_formulas(problem, sizes(federation), chosen(federation, 4), 2, 0.1)
    np.testing.assert_allclose(lambdas_of(federation), lambdas, atol=1e-6)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), w, atol=1e-6)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_with_fixed_weights_it_is_fedavg(participation):
    """Batch norm, dropout and shuffled batches: taking the loss leaves running statistics and random numbers alone."""
    a, b = (
        run(client(method, **options), unequal(batch_size=100), rounds=3, participation=participation)
        for method, options in [(AgnosticFL, {"step": 0.0}), (FedAvg, {})]
    )
    states = zip(weights(a).values(), weights(b).values(), strict=True)
    for mine, theirs in states:
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=0)
    n = sizes(a)
    np.testing.assert_array_equal(lambdas_of(a), n / n.sum())
    assert a.traffic.elements - b.traffic.elements == 3 * len(a.participants(0))  # the losses


def test_the_loss_is_the_global_model_s_on_all_plain_training_images():
    data = digits(2, augment=CropFlip(padding=2), batch_size=100)
    federation = run(client(AgnosticFL), data, rounds=1)
    member = federation.clients[0]
    with federation.draws.default_generators("weights"):
        initial = federation.prototype.build(member.spec)
    train = data.client(0).train
    [(images, labels)] = BatchLoader(train.data, train.dataset, 2000, train.label_map)
    initial.eval()
    expected = torch.nn.functional.cross_entropy(initial(images), labels)
    torch.testing.assert_close(member.upload()[LOSS], expected.detach())


@pytest.mark.seconds
def test_it_reaches_the_minimax_point():
    """Two balls of unlike curvature: the worst loss is least where both are equal. The third is never the worst."""
    roots, b = np.sqrt([1.0, 4.0]), np.array([[2.0, -1.0], [-1.0, 3.0]])
    minimax = roots @ b / roots.sum()
    problem = Quadratics(np.array([1.0, 4.0, 1.0])[:, None, None] * np.eye(2), np.vstack([b, minimax + 0.1]))
    assert problem.loss(0, minimax) == pytest.approx(problem.loss(1, minimax))
    federation = run(quadratic(AgnosticFL, problem, lr=0.2, step=0.01), unequal(3), rounds=80)
    np.testing.assert_allclose(flat(federation.coordinator.server.model), minimax, atol=1e-5)
    np.testing.assert_allclose(lambdas_of(federation), [*roots[::-1] / roots.sum(), 0.0], atol=1e-5)
    n = sizes(federation)
    mean = problem.optimum(n / n.sum())  # FedAvg's end
    assert max(problem.loss(k, mean) for k in range(3)) > 1.2 * problem.loss(0, minimax)


def started(n: list[int], **options) -> AgnosticFLServer:
    server = AgnosticFLServer(**options)
    server.start({k: ClientInfo(size, upload(0.0, 0.0)) for k, size in enumerate(n)})
    return server


def upload(w: float, loss: float) -> Payload:
    return Payload({"w": torch.tensor([w]), LOSS: torch.tensor(loss)})


def test_the_weights_of_those_who_take_no_part_stay():
    server = started([10, 20, 30, 40], step=0.1)
    server.aggregate(1, {1: upload(1.0, 1.0), 3: upload(4.0, 2.0)})
    assert server.model["w"] == pytest.approx((0.2 * 1 + 0.4 * 4) / 0.6)  # by the weights as they were
    assert list(server.lambdas.values()) == pytest.approx([0.1, 0.15, 0.3, 0.45])
    assert set(server.reply(0)) == {"w"}
    other = started([1, 1, 1, 1])
    other.load_state_dict(server.state_dict())
    assert other.lambdas == server.lambdas


def test_those_without_weight_move_nothing_and_can_come_back():
    server = started([10, 10, 10], step=1.0)
    server.aggregate(1, {0: upload(1.0, 0.0), 1: upload(1.0, 5.0), 2: upload(1.0, 0.0)})
    assert server.lambdas == {0: 0.0, 1: 1.0, 2: 0.0}
    server.aggregate(2, {0: upload(9.0, 1.0), 2: upload(9.0, 1.0)})
    assert server.model["w"] == 1
    server.aggregate(3, {0: upload(9.0, 0.5), 1: upload(2.0, 0.0)})
    assert server.model["w"] == 2
    assert server.lambdas == pytest.approx({0: 0.25, 1: 0.75, 2: 0.0})


def test_decay_multiplies_the_step_after_every_round():
    server = started([1, 1], step=0.1, decay=0.5)
    for round in (1, 2):
        server.aggregate(round, {0: upload(0.0, 0.0), 1: upload(0.0, 1.0)})
    assert server.lambdas == pytest.approx({0: 0.5 - 0.05 - 0.025, 1: 0.5 + 0.05 + 0.025})


def test_heads_at_home_and_averaged_running_statistics():
    federation = run(client(AgnosticFL, norm_stats="averaged"), digits(3, permute_labels=True), rounds=2)
    server = federation.coordinator.server
    before = started(sizes(federation).tolist(), step=0.1)
    assert not [name for name in server.model if ".head." in name]
    assert server.lambdas != before.lambdas
    assert server.model["backbone.body.1.num_batches_tracked"].dtype == torch.int64


def test_gradient_clipping_and_a_schedule():
    problem, options = Quadratics.random(), {"scheduler": step_schedule}
    federation = run(
        quadratic(AgnosticFL, problem, **options), unequal(), rounds=2, local_epochs=3,
        client_trainer={"gradient_clip_val": 0.01},
    )  # fmt: skip
    moved = flat(federation.coordinator.server.model) - problem.start
    assert 0 < np.linalg.norm(moved) <= 0.01 * 0.1 * (2 + 2 / 2 + 2 / 4) + 1e-12
    assert run(client(AgnosticFL), rounds=2, client_trainer={"gradient_clip_val": 1.0}).coordinator.round == 2
