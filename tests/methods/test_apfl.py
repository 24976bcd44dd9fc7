"""APFL: two models whose mixture is everybody's own."""

import numpy as np
import pytest
import torch
from torch import nn
from two_layers import (
    ALL,
    SGD,
    Recorded,
    TwoLayers,
    arrays,
    assert_close,
    backward,
    by_logits,
    combine,
    dot,
    gradient,
    logits,
    network,
    scores,
)

from lit_pfl.data import Dirichlet
from lit_pfl.errors import ConfigError
from lit_pfl.methods import APFL, Ditto, FedAvg, StandAlone
from lit_pfl.nn.factorization import Factorization
from tiny import Learner, MixedNet, TinyNet, assert_equal, client, digits, run, spec

MIXINGS = ["parameters", "logits"]


def of_the_mixture(v, w, alpha, batch, mixing):
    """The gradients of the mixture's loss by v and by alpha."""
    if mixing == "parameters":
        g = gradient(combine(alpha, v, 1 - alpha, w), batch)
        return {name: alpha * g[name] for name in g}, dot(g, combine(1, v, -1, w))
    images, labels = batch
    own, common = logits(v, images), logits(w, images)
    g = by_logits(alpha * own + (1 - alpha) * common, labels)
    return backward(v, images, alpha * g), float((g * (own - common)).sum())


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize(("alpha", "adaptive"), [(0.5, False), (0.75, False), (0.5, True), (0.01, True)])
def test_two_rounds_equal_the_formulas(alpha, adaptive, mixing):
    """Algorithm 1: both step on the same batch, v with alpha times the gradient at the mixture of before the step."""
    recorded = Recorded(APFL, rounds=3, alpha=alpha, adaptive=adaptive, mixing=mixing)
    common, personal = ([SGD() for _ in recorded.members] for _ in range(2))
    v, alphas = [recorded.start() for _ in recorded.members], [alpha for _ in recorded.members]

    def train(k, epoch, w, batches):
        for i, batch in enumerate(batches):
            by_v, by_alpha = of_the_mixture(v[k], w, alphas[k], batch, mixing)
            common[k].step(w, gradient(w, batch))
            personal[k].step(v[k], by_v)
            if adaptive and epoch == i == 0:
                alphas[k] = min(1.0, max(0.0, alphas[k] - 0.1 * by_alpha))

    expected = recorded.averaged(train, ALL)
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])
        assert_close(member.personal.backbone, v[k])
        assert float(member.alpha) == pytest.approx(alphas[k], abs=1e-5)
        images, _ = next(iter(member.data.test))
        x = images.flatten(1).double().numpy()
        mixture = {
            "parameters": logits(combine(alphas[k], v[k], 1 - alphas[k], expected[k]), x),
            "logits": alphas[k] * logits(v[k], x) + (1 - alphas[k]) * logits(expected[k], x),
        }[mixing]
        with torch.no_grad(), member.personalized() as learner:
            np.testing.assert_allclose(learner(images).numpy(), mixture, atol=2e-4)
    assert (alphas != [alpha] * 3) is adaptive


@pytest.mark.few(3)
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize(
    "client_trainer", [{}, {"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}]
)
def test_the_common_model_is_fedavg_s_bit_for_bit(mixing, client_trainer):
    """It is stepped once a batch, and feels nothing of the mixture's loss."""
    apfl, fedavg = (
        run(method, digits(3), rounds=3, client_trainer=client_trainer)
        for method in (client(APFL, mixing=mixing, adaptive=True), client(FedAvg))
    )
    assert_equal(network(apfl, "backbone"), network(fedavg, "backbone"))
    assert apfl.traffic.state_dict() == fedavg.traffic.state_dict()
    steps = {len(member.training_data()) * 3 for member in apfl.clients.values()}
    assert {member.trainer.global_step for member in apfl.clients.values()} == steps


class Twice(APFL):
    """The common model's gradient is there once more when the personal one's comes."""

    def objective(self, batch, batch_idx):
        images, labels = batch
        return super().objective(batch, batch_idx) + nn.functional.cross_entropy(self.backbone(images), labels)


class Attached(APFL):
    """The mixture's loss moves the common model."""

    def objective(self, batch, batch_idx):
        images, labels = batch
        mixed = self.alpha * self.personal(images) + (1 - self.alpha) * self.learner(images)
        return self.loss(self.learner, batch, batch_idx) + nn.functional.cross_entropy(mixed, labels)


@pytest.mark.parametrize("wrong", [Twice, Attached])
def test_a_common_model_that_is_stepped_twice_would_be_seen(wrong):
    right, broken = (run(client(method, backbone=MixedNet), digits(2)) for method in (FedAvg, wrong))
    difference = right.clients[0].backbone.head.weight - broken.clients[0].backbone.head.weight
    assert float(difference.abs().max()) > 0.01


@pytest.mark.few(4)
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("evaluate", ["before", "after"])
@pytest.mark.parametrize("permuted", [False, True])
def test_alpha_zero_evaluates_as_fedavg(mixing, evaluate, permuted):
    apfl, fedavg = (
        run(method, digits(3, permute_labels=permuted), rounds=3, evaluate=evaluate)
        for method in (client(APFL, alpha=0.0, mixing=mixing), client(FedAvg))
    )
    assert scores(apfl) == scores(fedavg)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_common_model_is_weighted_as_asked_for(mixing, weighting):
    unequal = {"batch_size": 200, "partition": Dirichlet(alpha=1.0)}
    apfl, ditto = (
        run(method, digits(3, **unequal), rounds=2)
        for method in (client(APFL, mixing=mixing, weighting=weighting), client(Ditto, weighting=weighting))
    )
    assert_equal(network(apfl, "backbone"), network(ditto, "backbone"))


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("batch_size", [2000, 64], ids=["full batches", "batches"])
def test_alpha_one_is_stand_alone_bit_for_bit(mixing, batch_size):
    data = {"batch_size": batch_size, "partition": Dirichlet(alpha=1.0)}
    apfl, alone = (
        run(method, digits(3, **data), rounds=3)
        for method in (client(APFL, alpha=1.0, mixing=mixing), client(StandAlone))
    )
    assert_equal(network(apfl, "personal"), network(alone, "backbone"))
    assert scores(apfl) == scores(alone)


def test_alpha_one_is_stand_alone_for_factorized_networks():
    apfl, alone = (
        run(client(method, factorization=Factorization(l1=1e-2), **options), digits(2))
        for method, options in ((APFL, {"alpha": 1.0, "mixing": "parameters"}), (StandAlone, {}))
    )
    assert_equal(network(apfl, "personal"), network(alone, "backbone"))


def test_statistics_of_mixed_parameters_are_the_mixture_s():
    """In training mode batch norm takes the batch's own statistics: what it then has kept is what it has seen."""
    member = client(APFL, mixing="parameters", backbone=MixedNet).build(spec(channels=1, image_size=8))
    with torch.no_grad():
        for weight in member.personal.parameters():
            weight.add_(torch.randn_like(weight))
    images = torch.randn(50, 1, 8, 8)
    member.objective((images, torch.randint(10, (50,))), 0)
    w, v = arrays(member.backbone), arrays(member.personal.backbone)
    mixed = MixedNet(1, 10)
    mixed.load_state_dict({name: torch.tensor((w[name] + v[name]) / 2) for name in w}, strict=False)
    mixed(images)
    torch.testing.assert_close(member.personal.backbone.body[1].running_mean, mixed.body[1].running_mean)
    torch.testing.assert_close(member.personal.backbone.body[1].running_var, mixed.body[1].running_var)
    common = MixedNet(1, 10)
    common.load_state_dict({name: torch.tensor(w[name]) for name in w}, strict=False)
    common(images)
    torch.testing.assert_close(member.backbone.body[1].running_mean, common.body[1].running_mean)


@pytest.mark.parametrize(("backbone", "mixing"), [(TwoLayers, "parameters"), (TinyNet, "logits")])
def test_networks_with_batch_norm_mix_logits_by_default(backbone, mixing):
    method = client(APFL, backbone=backbone)
    assert method.build(spec(channels=1, image_size=8)).mixing == mixing
    assert method.mixing is None


@pytest.mark.seconds
def test_alpha_stays_between_0_and_1_and_moves_once_a_round():
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "adaptive": True, "backbone": TwoLayers}
    moved = []

    class Watched(APFL):
        def _adapt(self, loss, alpha):
            super()._adapt(loss, alpha)
            moved.append((self.spec.client_id, self.trainer.current_epoch))

    federation = run(client(Watched, **options), digits(2), rounds=4, local_epochs=3)
    assert sorted(moved) == [(k, 3 * r) for k in range(2) for r in range(4)]
    assert all(0 <= float(member.alpha) <= 1 for member in federation.clients.values())


def test_errors():
    with pytest.raises(ConfigError, match=r"model\.alpha=1\.5: give a weight from 0"):
        APFL(alpha=1.5)


def test_outputs_that_are_no_tensors_are_named_in_training_and_in_scoring():
    class InDicts(Learner):
        def forward(self, x):
            return {"logits": super().forward(x)}

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0])["logits"], batch[1])

    member = APFL(learner=InDicts(nn.Linear(6, 5), nn.Linear(5, 3)), mixing="logits").build(spec())
    x, y = torch.rand(4, 6), torch.arange(4) % 3
    expected = "the steps of InDicts do not call it, or get something else; use model.mixing=parameters"
    with pytest.raises(ConfigError, match=expected):
        member.objective((x, y), 0)
    with pytest.raises(ConfigError, match=expected), member.personalized() as personal:
        personal(x)
