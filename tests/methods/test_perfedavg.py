"""Per-FedAvg against its formulas, and what becomes of it without an inner step."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric
from two_layers import (
    ALL,
    SGD,
    Recorded,
    TwoLayers,
    arrays,
    assert_close,
    combine,
    gradient,
    logits,
)

from foreign import PROJECTS
from lit_pfl import Federation
from lit_pfl.data import BatchLoader
from lit_pfl.learners import split_batch
from lit_pfl.learners.scoring import score
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedAvg, PerFedAvg
from lit_pfl.models import Backbone
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.tensors import tensors_of
from tiny import Learner, MixedNet, Parts, assert_equal, client, digits, run, spec, trainer, weights


def divided(batch, parts):
    return list(zip(*(np.array_split(array, parts) for array in batch), strict=True))


def direction(w, batch, alpha, order, delta):
    """The gradient of a step at w, by the two approximations of Fallah et al."""
    if order == "first":
        d1, d2 = divided(batch, 2)
        return gradient(combine(1, w, -alpha, gradient(w, d1)), d2)
    d1, d2, d3 = divided(batch, 3)
    g = gradient(combine(1, w, -alpha, gradient(w, d1)), d2)
    above, below = gradient(combine(1, w, delta, g), d3), gradient(combine(1, w, -delta, g), d3)
    return combine(1, g, -alpha / (2 * delta), combine(1, above, -1, below))


@pytest.mark.seconds
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("order", "alpha", "delta"), [("first", 0.3, 1.0), ("hessian_free", 0.3, 0.05)])
def test_two_rounds_equal_the_formulas(order, alpha, delta, weighting):
    options = {"alpha": alpha, "order": order, "delta": delta}
    recorded = Recorded(PerFedAvg, weighting=weighting, **options)
    optimizers = [SGD() for _ in recorded.members]

    def train(k, epoch, w, batches):
        for batch in batches:
            optimizers[k].step(w, direction(w, batch, **options))

    expected = recorded.averaged(train, ALL, uniform=weighting == "uniform")
    plain = recorded.averaged(lambda k, e, w, batches: None, ALL)
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])
        assert np.abs(expected[k]["head.weight"] - plain[k]["head.weight"]).max() > 0.03


def test_the_formulas_are_told_apart():
    """What others got wrong moves the weights by more than the tolerance above."""
    recorded = Recorded(PerFedAvg, local_epochs=1, rounds=1, alpha=0.3)
    w, batch = recorded.start(), recorded.batches[0][0]
    d1, d2 = divided(batch, 2)
    right = direction(w, batch, 0.3, "first", 1.0)
    inner = gradient(w, d1)
    not_restored = combine(3, inner, 1, right)  # steps from w~, seen from w with lr 0.1
    same_batch = gradient(combine(1, w, -0.3, gradient(w, d2)), d2)
    for wrong in (not_restored, same_batch, gradient(w, d2)):
        assert 0.1 * np.abs(wrong["head.weight"] - right["head.weight"]).max() > 1e-4


class LeastSquares(PerFedAvg):
    """A quadratic f, whose Hessian is known."""

    def loss(self, learner, batch, batch_idx):
        images, labels = batch
        return (learner(images)[:, 0] - labels).square().mean() / 2


@pytest.mark.parametrize(("order", "delta"), [("hessian_free", 1e-3), ("hessian_free", 1.0), ("exact", 1.0)])
def test_second_order_on_a_quadratic(order, delta):
    """(I - alpha H3) grad f(w - alpha grad f(w; D1); D2), where differences are exact for any delta."""
    linear = lambda *_: Parts(nn.Flatten(), nn.Linear(4, 1))  # noqa: E731
    method = LeastSquares(alpha=0.2, order=order, delta=delta, backbone=linear)
    member = method.build(spec(channels=1, image_size=2)).double()
    images, labels = torch.randn(12, 1, 2, 2, dtype=torch.double), torch.randn(12, dtype=torch.double)
    loss = member.objective((images, labels), 0)
    loss.backward()

    x = np.concatenate([images.flatten(1).numpy(), np.ones((12, 1))], axis=1)
    y, w = labels.numpy(), np.concatenate([a.ravel() for a in arrays(member.backbone).values()])
    (x1, y1), (x2, y2), (x3, _) = divided((x, y), 3)
    stepped = w - 0.2 * x1.T @ (x1 @ w - y1) / 4
    g = x2.T @ (x2 @ stepped - y2) / 4
    expected = (np.eye(5) - 0.2 * x3.T @ x3 / 4) @ g
    ours = np.concatenate([p.grad.numpy().ravel() for p in member.backbone.parameters()])
    np.testing.assert_allclose(ours, expected, atol=1e-9)
    assert float(loss.detach()) == pytest.approx(np.square(x2 @ stepped - y2).mean() / 2)
    np.testing.assert_allclose(np.concatenate([a.ravel() for a in arrays(member.backbone).values()]), w)


def test_exact_is_the_gradient_of_the_loss_after_the_inner_step():
    """With D1 = D2 = D3 the gradient is that of ``f(w - alpha grad f(w))`` as a function of w."""
    member = PerFedAvg(alpha=0.3, order="exact", backbone=TwoLayers).build(spec(channels=1, image_size=8)).double()
    images, labels = torch.randn(7, 1, 8, 8, dtype=torch.double), torch.randint(10, (7,))
    member.objective((images.repeat(3, 1, 1, 1), labels.repeat(3)), 0).backward()
    w = {name: weight.detach().requires_grad_() for name, weight in member.backbone.named_parameters()}

    def f(w):
        return nn.functional.cross_entropy(torch.func.functional_call(member.backbone, w, images), labels)

    inner = torch.autograd.grad(f(w), list(w.values()), create_graph=True)
    outer = f({name: weight - 0.3 * g for (name, weight), g in zip(w.items(), inner, strict=True)})
    expected = torch.autograd.grad(outer, list(w.values()))
    for weight, theirs in zip(member.backbone.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, theirs)


def test_a_loss_that_is_linear_in_the_weights_has_no_curvature():
    class Linear(PerFedAvg):
        def loss(self, learner, batch, batch_idx):
            return learner(batch[0]).mean()

    linear = lambda *_: Parts(nn.Flatten(), nn.Linear(4, 1, bias=False))  # noqa: E731
    member = Linear(order="exact", backbone=linear).build(spec(channels=1, image_size=2))
    images = torch.randn(12, 1, 2, 2)
    member.objective((images, torch.zeros(12)), 0).backward()
    torch.testing.assert_close(next(member.backbone.parameters()).grad, images[4:8].flatten(1).mean(0, keepdim=True))


def test_hessian_free_sees_one_function_on_both_sides():
    """Dropout drawn anew for each side would make the difference that of two functions, over a tiny delta."""

    class Dropped(Backbone):
        def __init__(self, *_):
            super().__init__(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(64, 10))

    sizes = []
    for order in ("first", "hessian_free"):
        torch.manual_seed(0)
        member = PerFedAvg(order=order, delta=1e-3, backbone=Dropped).build(spec(channels=1, image_size=8))
        member.objective((torch.randn(90, 1, 8, 8), torch.randint(10, (90,))), 0).backward()
        sizes.append(float(member.backbone.head.weight.grad.norm()))
    assert sizes[1] < 2 * sizes[0]


@pytest.mark.seconds
@pytest.mark.parametrize(("order", "parts"), [("first", 2), ("hessian_free", 3), ("exact", 3)])
def test_without_an_inner_step_it_is_fedavg_on_the_second_parts_bit_for_bit(order, parts):
    """With alpha = 0 a step is along the gradient at w of D2. D1 then only moves statistics, unless told not to."""

    class SecondParts(FedAvg):
        def training_data(self):
            batches = copy.copy(self.data.train)
            batches.batch_size *= parts
            return batches

        def objective(self, batch, batch_idx):
            images, labels = batch
            return super().objective((images.tensor_split(parts)[1], labels.tensor_split(parts)[1]), batch_idx)

    options = {"order": order, "weighting": "samples", "inner_statistics": False}
    ours = client(PerFedAvg, alpha=0.0, backbone=MixedNet, **options)
    federations = [run(method, digits(3, batch_size=64)) for method in (ours, client(SecondParts, backbone=MixedNet))]
    assert_equal(weights(federations[0]), weights(federations[1]))
    accuracy = [[row.scores["acc"] for row in federation.rows] for federation in federations]
    assert accuracy[0] == accuracy[1]


@pytest.mark.seconds
@pytest.mark.parametrize(("order", "parts"), [("first", 2), ("hessian_free", 3), ("exact", 3)])
def test_a_step_uses_consecutive_batches_of_an_epoch(order, parts):
    federation = run(client(PerFedAvg, order=order), digits(2, batch_size=64), rounds=2, local_epochs=3)
    for member in federation.clients.values():
        n = len(member.data.train.dataset)
        assert member.parts == parts
        assert member.training_data().batch_size == 64 * parts
        assert member.data.train.batch_size == 64
        assert member.trainer.global_step == 2 * 3 * -(-n // (64 * parts))
    images = torch.arange(10.0).view(10, 1, 1, 1)
    divided = split_batch((images, torch.arange(10)), parts)
    assert torch.equal(torch.cat([x for x, _ in divided]), images)
    assert [len(y) for _, y in divided] == ([5, 5] if parts == 2 else [4, 3, 3])
    few = split_batch((images[: 2 * parts - 1], torch.arange(2 * parts - 1)), parts)
    assert [len(y) for _, y in few] == [2 * parts - 1] * parts


def test_batch_norm_counts_every_pass_or_the_last():
    counts = {}
    for inner in (True, False):
        for order in ("first", "hessian_free", "exact"):
            member = client(PerFedAvg, order=order, inner_statistics=inner).build(spec(channels=1, image_size=8))
            member.objective((torch.randn(12, 1, 8, 8), torch.randint(10, (12,))), 0)
            counts[inner, order] = int(member.backbone.body[1].num_batches_tracked)
    assert [counts[True, order] for order in ("first", "hessian_free", "exact")] == [2, 4, 3]
    assert [counts[False, order] for order in ("first", "hessian_free", "exact")] == [1, 1, 1]


def personal_score(member):
    with member.personalized() as learner:
        return score(learner, member.data.test, "test")


@pytest.mark.seconds
@pytest.mark.parametrize("permuted", [False, True])
def test_what_is_evaluated_is_one_step_away(permuted):
    """One step along the gradient on all training data; afterwards the model is what it was."""
    data = digits(3, batch_size=100, permute_labels=permuted)
    method = client(PerFedAvg, alpha=0.7, backbone=TwoLayers)
    federation = run(method, data)
    before = weights(federation)
    for k, member in federation.clients.items():
        train = member.data.train
        [(images, labels)] = BatchLoader(train.data, train.dataset, 10_000, train.label_map)
        w = arrays(member.backbone)
        w = combine(1, w, -0.7, gradient(w, (images.flatten(1).double().numpy(), labels.numpy())))
        for images, labels in member.data.test:
            expected = logits(w, images.flatten(1).double().numpy())
            with member.personalized() as learner, torch.no_grad():
                np.testing.assert_allclose(learner(images).numpy(), expected, atol=1e-4)
            hits = int((expected.argmax(1) == labels.numpy()).sum())
        found = personal_score(member)
        assert round(found.values["acc"] * found.n) == hits  # the test data are one batch
        assert federation.rows[k].scores == found.values
    assert_equal(weights(federation), before)


@pytest.mark.seconds
def test_evaluation_draws_nothing_and_leaves_no_trace():
    """TinyNet has batch norm and dropout."""
    federation = run(client(PerFedAvg, alpha=0.5), digits(2))
    member, before, state = federation.clients[0], weights(federation), torch.get_rng_state()
    scores = [personal_score(member) for _ in range(2)]
    assert scores[0] == scores[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(weights(federation), before)
    assert member.training
    assert all(weight.grad is None for weight in member.parameters())
    member.alpha = 0.0
    assert personal_score(member) != scores[0]


@pytest.mark.seconds
@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_testing_a_checkpoint_gives_the_last_round_s_scores(tmp_path, evaluate):
    """A Trainer tests in inference mode, where nothing has a gradient by itself."""
    method = client(PerFedAvg, alpha=0.5)
    federation = Federation(method, seed=3, threads=1, evaluate=evaluate, participation=2)
    fitting = trainer(2)
    fitting.fit(federation, datamodule=digits(3))
    assert len({row.client for row in federation.rows}) == 3
    fitting.save_checkpoint(tmp_path / "last.ckpt")
    restored, testing = Federation(method, evaluate=evaluate, participation=2), trainer()
    testing.test(restored, datamodule=digits(3), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert restored.rows == federation.rows
    predicted = testing.predict(restored, datamodule=digits(3), ckpt_path=tmp_path / "last.ckpt")
    for found in predicted:
        for k, z in found.items():
            labels = torch.cat([y for _, y in restored.data.client(k).test])
            assert float((z.argmax(1) == labels).double().mean()) == pytest.approx(federation.rows[k].scores["acc"])


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_inner_batches_do_not_count_in_the_learner_s_metrics(order):
    class Counts(Learner):
        def __init__(self):
            super().__init__(nn.Identity(), nn.Linear(2, 2))
            self.seen = SumMetric()

        def training_step(self, batch, batch_idx):
            self.seen(len(batch[0]))
            self.log("seen", self.seen)
            return super().training_step(batch, batch_idx)

    module = PerFedAvg(learner=Counts(), order=order)
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    module.learner.log = module.log
    module.objective((torch.randn(12, 2), torch.randint(0, 2, (12,))), 0)
    assert module.learner.seen.compute() == 12 / module.parts


@pytest.mark.seconds
def test_under_a_trainer_of_one_s_own_it_is_scored_before_it_has_trained_too():
    """In a sanity check, before the Trainer has made its training loader; it changes nothing of what follows."""
    project, ended = PROJECTS["Regression"], []
    for sanity in (0, 2):
        hub, sites = LocalHub(seed=1), []

        def fit(client, hub=hub, sites=sites, sanity=sanity):
            sites.append(project.method(PerFedAvg))
            data = project.data().modules[client]
            own = trainer(2, callbacks=[FederatedLoop(hub.link)], num_sanity_val_steps=sanity)
            own.fit(sites[-1], data.train_dataloader(), data.val_dataloader())

        for site in range(2):
            hub.add(site, lambda site=site, fit=fit: fit(site))
        hub.run(project.method(PerFedAvg).configure_server())
        ended.append(tensors_of(sites[1]))
    assert_equal(*ended)
