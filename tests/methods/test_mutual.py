"""FML and FedKD against their formulas."""

from functools import partial

import numpy as np
import pytest
import torch
from heads import Uniform, learners, skewed, softmax

from lit_pfl import Federation
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FML, FedKD, StandAlone
from lit_pfl.methods.knowledge.fedkd import CHANGE, in_factors, needed_rank
from lit_pfl.methods.knowledge.fml import divergence
from lit_pfl.models import MLP
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, client, digits, run, trainer, weights


def personal(federation):
    return {k: dict(tensors_of(member.personal)) for k, member in federation.clients.items()}


@pytest.mark.seconds
def test_without_learning_from_each_other_they_are_fedavg_and_stand_alone_bit_for_bit():
    a = run(client(FML, alpha=1.0, beta=1.0), skewed(), rounds=3)
    assert_equal(learners(a), weights(run(client(Uniform), skewed(), rounds=3)))
    assert_equal(personal(a), weights(run(client(StandAlone), skewed(), rounds=3)))


def test_divergence_equals_the_formula():
    rng = np.random.default_rng(0)
    teacher, student = rng.normal(size=(2, 5, 3))
    p, q = softmax(teacher), softmax(student)
    z = torch.tensor(teacher, requires_grad=True)
    value = divergence(z, torch.tensor(student, requires_grad=True))
    assert float(value.detach()) == pytest.approx((p * np.log(p / q)).sum(1).mean())
    assert torch.autograd.grad(value, z, allow_unused=True) == (None,)


@pytest.mark.parametrize(("method", "options"), [(FML, {"alpha": 0.3, "beta": 0.8}), (FedKD, {})])
def test_the_objective_equals_the_formula_for_each_model(method, options):
    member = run(client(method, **options), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    w, v = member.backbone, member.personal.backbone
    h_w, h_v = w.body(images), v.body(images)
    z_w, z_v = w.head(h_w), v.head(h_v)
    f_w, f_v = (torch.nn.functional.cross_entropy(z, labels) for z in (z_w, z_v))
    kl_v, kl_w = divergence(z_w, z_v), divergence(z_v, z_w)
    if method is FML:
        of_v, of_w = 0.3 * f_v + 0.7 * kl_v, 0.8 * f_w + 0.2 * kl_w
    else:
        s = (f_v + f_w).detach()
        of_v = f_v + (kl_v + (h_v - member.matched(h_w).detach()).square().mean()) / s
        of_w = f_w + (kl_w + (h_v.detach() - member.matched(h_w)).square().mean()) / s
    expected = [
        *torch.autograd.grad(of_v, list(v.parameters()), retain_graph=True),
        *torch.autograd.grad(of_w, list(w.parameters())),
    ]
    made = torch.autograd.grad(member.objective((images, labels), 0), [*v.parameters(), *w.parameters()])
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------- factors


def test_as_few_singular_values_as_hold_the_energy():
    values = torch.tensor([2.0, 1.0, 1.0, 0.1]).double()  # squares 4, 1, 1, 0.01
    assert [needed_rank(values, t) for t in (0.5, 0.8, 0.99, 0.999)] == [1, 2, 3, None]
    assert needed_rank(torch.ones(4).double(), 1.0) is None  # sent whole
    assert needed_rank(torch.tensor([3.0, 0.0]).double(), 0.99) == 1
    assert needed_rank(torch.zeros(3).double(), 0.95) == 1


def test_factors_are_the_best_approximation():
    torch.manual_seed(0)
    matrix, convolution, vector = torch.randn(6, 4), torch.randn(4, 3, 3, 3), torch.randn(5)
    payload = in_factors({"a": matrix, "b": convolution, "c": vector}, 0.8)
    assert set(payload.low_rank) == {"a", "b"}
    assert torch.equal(payload["c"], vector)
    u, s, vt = np.linalg.svd(matrix.double().numpy())
    k = payload.low_rank["a"].rank
    np.testing.assert_allclose(payload["a"], (u[:, :k] * s[:k]) @ vt[:k], atol=1e-5)
    assert (s[:k] ** 2).sum() > 0.8 * (s**2).sum() >= (s[: k - 1] ** 2).sum()


@pytest.mark.seconds
def test_with_all_energy_and_no_distillation_the_mentee_is_fedavg_s(monkeypatch):
    monkeypatch.setattr("lit_pfl.methods.knowledge.fedkd.divergence", lambda teacher, student: 0 * student.sum())
    monkeypatch.setattr(torch.nn.functional, "mse_loss", lambda a, b: 0 * (a + b).sum())
    a = run(client(FedKD, energy_start=1.0, energy_end=1.0), skewed(), rounds=3)
    b = run(client(Uniform), skewed(), rounds=3)
    own, other = learners(a), weights(b)
    for k, tensors in other.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(own[k][name], tensor, atol=1e-4, rtol=1e-3)


def test_every_client_holds_the_server_s_model_whenever_it_takes_part():
    held = []

    class Watched(FedKD):
        def begin_round(self):
            super().begin_round()
            held.append((int(self.completed), {name: x.clone() for name, x in self.received.items()}))

    models = {}
    federation = run(client(Watched, energy_start=0.5, energy_end=0.6, rounds=4), skewed(4), rounds=5, participation=2)
    server = federation.coordinator.server
    for completed, received in held:
        models.setdefault(completed, []).append(received)
    for both in models.values():
        for name in both[0]:
            torch.testing.assert_close(both[0][name], both[1][name], atol=1e-6, rtol=0)
    replies = {k: server.reply(k) for k in federation.clients}
    assert [k for k, reply in replies.items() if CHANGE in reply] == server.participants
    change, whole = (replies[k] for k in (min(server.participants), min(replies.keys() - {*server.participants})))
    assert change.low_rank
    assert set(whole) == set(change) - {CHANGE}


def test_a_change_that_comes_twice_is_added_once():
    """As after a round of which no upload could be used."""
    federation = run(client(FedKD, energy_start=0.5, energy_end=0.6), skewed(2), rounds=2)
    server, member = federation.coordinator.server, federation.clients[0]
    for _ in range(2):
        member.download(server.reply(0))
        for name, own in member.before_round.items():
            torch.testing.assert_close(own, server.model[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_what_matches_features_is_clipped_by_itself(algorithm):
    member = run(client(FedKD), skewed(2), rounds=1).clients[0]
    clip = torch.nn.utils.clip_grad_value_ if algorithm == "value" else torch.nn.utils.clip_grad_norm_
    parts = [list(part.parameters()) for part in (member.learner, member.personal, member.matched)]
    expected = []
    for number, weights_of in enumerate(parts, 1):
        for weight in weights_of:
            weight.grad = torch.full_like(weight, float(number))
        clip(weights_of, 0.5)
        expected += [weight.grad for weight in weights_of]
        for weight in weights_of:
            weight.grad = torch.full_like(weight, float(number))
    member.configure_gradient_clipping(member.trainer.optimizers[0], 0.5, algorithm)
    for weight, grad in zip([weight for part in parts for weight in part], expected, strict=True):
        torch.testing.assert_close(weight.grad, grad)


def test_the_energy_rises_over_the_rounds():
    method = FedKD(rounds=5)
    assert [round(method.energy(t), 4) for t in (0, 2, 4, 9)] == [0.95, 0.965, 0.98, 0.98]


def test_a_factorization_is_refused():
    with pytest.raises(ConfigError, match="FedKD sends matrices in factors of its own"):
        FedKD(factorization=Factorization())


@pytest.mark.seconds
def test_changes_in_factors_are_in_a_checkpoint(tmp_path):
    """On a network that is large enough for them; those of the generic tests are not."""

    def fit(rounds, path=None):
        federation = Federation(
            FedKD(backbone=partial(MLP, hidden=24), energy_start=0.5, energy_end=0.5), seed=1, threads=1
        )
        last = LastCheckpoint(tmp_path)
        fitting = trainer(rounds, callbacks=[last], enable_checkpointing=True)
        fitting.fit(federation, datamodule=digits(3), ckpt_path=path)
        return federation

    whole = fit(3)
    assert whole.coordinator.server.change.low_rank
    fit(2)
    resumed = fit(3, tmp_path / "last.ckpt")
    assert_equal(weights(resumed), weights(whole))
    assert resumed.traffic.state_dict() == whole.traffic.state_dict()
