"""FedIT, FFA-LoRA, FedSA-LoRA, FlexLoRA and FedDPA against their formulas, on a LoRA by hand and on one of peft."""

from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import Dirichlet, PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedDPA, FedIT, FedSALoRA, FFALoRA, FlexLoRA
from lit_pfl.methods.adapters.feddpa import MixedLayer, Mixing, WeighInputs
from lit_pfl.methods.adapters.flexlora import FlexLoRAServer, mean_product
from lit_pfl.nn.adapters import adapted_layers, lora_factors
from lit_pfl.testing import MethodTester, assert_equal
from lit_pfl.testing.method_tester import LoRALinear, LoRANet
from lit_pfl.testing.methods import (
    bytes_are_those_of_the_encoded_payloads,
    clients_that_do_not_take_part_stay_as_they_are,
    resumed_equals_uninterrupted,
)
from tiny import Parts, client, digits, run, spec, weights

ALL = [FFALoRA, FedDPA, FedIT, FedSALoRA, FlexLoRA]
LAYER = "backbone.body.4"
A, B = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight"


def of(method, **options):
    return client(method, **{"backbone": LoRANet, **options})


def data():
    return digits(3, partition=Dirichlet(1.0))


def trained(method, rounds=2, **options):
    return run(of(method, **options), data(), rounds=rounds, local_epochs=2)


def learners(federation):
    return {
        k: {name: t for name, t in state.items() if name.startswith("backbone.")}
        for k, state in weights(federation).items()
    }


@pytest.mark.seconds
def test_fedit_is_fedavg_of_adapters():
    a, b = trained(FedIT), trained(FedAvg, shares="adapter")
    assert_equal(weights(a), weights(b))
    assert_equal(a.traffic.state_dict(), b.traffic.state_dict())
    assert set(a.clients[0].upload()) == {A, B}


def test_fedsalora_averages_a_alone():
    a, b = trained(FedSALoRA), trained(FedAvg, shares="lora_A")
    assert_equal(weights(a), weights(b))
    assert set(a.clients[0].upload()) == {A}
    own = weights(a)
    assert not torch.equal(own[0][B], own[1][B])


def test_ffalora_keeps_a_and_the_mean_of_b_is_that_of_the_products():
    federation = trained(FFALoRA)
    own = weights(federation)
    with federation.draws.default_generators("weights"):
        first = federation.prototype.build(federation.clients[0].spec).learner.state_dict()
    for state in own.values():
        assert torch.equal(state[A], first[A])
    uploads = [member.upload() for member in federation.clients.values()]
    assert all(set(upload) == {B} for upload in uploads)
    n = [federation.data.client(k).num_samples for k in federation.clients]
    products = np.average([upload[B].numpy() @ first[A].numpy() for upload in uploads], axis=0, weights=n)
    np.testing.assert_allclose(
        federation.coordinator.server.reply(1)[B].numpy() @ first[A].numpy(), products, atol=1e-6
    )
    assert np.abs(products).max() > 1e-3


# ------------------------------------------------------------------------------------------------------------ FlexLoRA


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def test_the_server_of_flexlora_equals_the_formula():
    ranks, n = {0: 2, 1: 3, 2: 1}, {0: 10, 1: 30, 2: 60}
    a, b = {k: drawn(r, 6) for k, r in ranks.items()}, {k: drawn(5, r) for k, r in ranks.items()}
    other = {k: drawn(4) * k for k in ranks}
    sent = {
        k: Payload({name: torch.tensor(x[k], dtype=torch.float32) for name, x in (("a", a), ("b", b), ("c", other))})
        for k in ranks
    }
    server = FlexLoRAServer({"a": "b"})
    server.start({k: ClientInfo(n[k], payload) for k, payload in sent.items()})
    for k, r in ranks.items():  # before the first round: those of the largest rank
        np.testing.assert_allclose(server.reply(k)["a"], a[1][:r], rtol=1e-6)
        np.testing.assert_allclose(server.reply(k)["b"], b[1][:, :r], rtol=1e-6)
    server.aggregate(1, sent)
    u, s, vt = np.linalg.svd(sum(n[k] / 100 * b[k] @ a[k] for k in ranks))
    for k, r in ranks.items():
        reply = server.reply(k)
        assert reply["a"].shape == (r, 6)
        np.testing.assert_allclose(reply["b"].numpy() @ reply["a"].numpy(), u[:, :r] * s[:r] @ vt[:r], atol=1e-5)
        np.testing.assert_allclose(reply["a"].numpy() @ reply["a"].numpy().T, np.eye(r), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(reply["b"], axis=0), s[:r], rtol=1e-5)
    mean = sum(n[k] / 100 * other[k] for k in ranks)
    np.testing.assert_allclose(server.reply(0)["c"], mean, rtol=1e-6)


def test_a_mean_of_a_lower_rank_leaves_no_row_of_a_at_zero():
    """Else a row of A and its column of B would be zero for ever: neither has a gradient then."""
    ranks = {0: 4, 1: 1}
    sent = {k: Payload({"a": torch.randn(r, 6), "b": torch.randn(5, r)}) for k, r in ranks.items()}
    server = FlexLoRAServer({"a": "b"})
    server.start({k: ClientInfo(1, payload) for k, payload in sent.items()})
    server.aggregate(1, {1: sent[1]})
    reply = server.reply(0)
    torch.testing.assert_close(reply["b"] @ reply["a"], sent[1]["b"] @ sent[1]["a"], atol=1e-5, rtol=0)
    torch.testing.assert_close(reply["a"] @ reply["a"].T, torch.eye(4), atol=1e-5, rtol=0)


def test_a_mean_of_convolutions_is_of_their_matrices():
    a, b = torch.randn(2, 3, 3, 3), torch.randn(5, 2, 1, 1)
    new_a, new_b = mean_product([(a, b), (a, b)], [0.5, 0.5], 2)
    assert new_a.shape == a.shape
    assert new_b.shape == b.shape
    expected = b.flatten(1) @ a.flatten(1)
    torch.testing.assert_close(new_b.flatten(1) @ new_a.flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_clients_of_flexlora_have_their_ranks_and_learn_the_mean():
    federation = trained(FlexLoRA, ranks=[4, 2, 1])
    members, server = federation.clients, federation.coordinator.server
    assert [member.learner.get_parameter(A).shape[0] for member in members.values()] == [4, 2, 1]
    uploads = {k: member.upload() for k, member in members.items()}
    n = [federation.data.client(k).num_samples for k in members]
    gained = [2.0 * (member.learner.get_parameter(B) @ member.learner.get_parameter(A)) for member in members.values()]
    mean = np.average([x.detach().numpy() for x in gained], axis=0, weights=n)
    u, s, vt = np.linalg.svd(mean)
    for k, member in members.items():
        member.download(server.reply(k))
        r = member.learner.get_parameter(A).shape[0]
        again = 2.0 * (member.learner.get_parameter(B) @ member.learner.get_parameter(A)).detach().numpy()
        np.testing.assert_allclose(again, u[:, :r] * s[:r] @ vt[:r], atol=1e-5)
        np.testing.assert_allclose(uploads[k][B].shape, (8, r))
        member.load_global(server.global_model())
        np.testing.assert_allclose(
            2.0 * (member.learner.get_parameter(B) @ member.learner.get_parameter(A)).detach(), again, atol=1e-6
        )


def test_where_a_is_the_same_flexlora_of_full_rank_comes_to_what_fedit_does():
    """Without training, and of orthonormal A, the mean of the products is the product of the means."""
    a = torch.linalg.qr(torch.randn(6, 3)).Q.T
    sent = {k: Payload({"a": a, "b": torch.randn(5, 3)}) for k in range(3)}
    server = FlexLoRAServer({"a": "b"})
    server.start({k: ClientInfo(k + 1, payload) for k, payload in sent.items()})
    server.aggregate(1, sent)
    mean = sum((k + 1) / 6 * upload["b"] for k, upload in sent.items())
    torch.testing.assert_close(server.model["b"] @ server.model["a"], mean @ a, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "check",
    [
        resumed_equals_uninterrupted,
        clients_that_do_not_take_part_stay_as_they_are,
        bytes_are_those_of_the_encoded_payloads,
    ],
    ids=lambda check: check.__name__,
)
def test_ranks_that_differ_hold_the_rules(check):
    check(MethodTester(partial(FlexLoRA, ranks=[4, 2, 1])))


def test_what_flexlora_cannot_do_is_said():
    with pytest.raises(ConfigError, match=r"^model\.ranks=\[\]: give at least one rank"):
        FlexLoRA(ranks=[])
    with pytest.raises(ConfigError, match=r"^model\.ranks: 5 is more than 4, the rank of 'backbone.*lora_A"):
        trained(FlexLoRA, ranks=[4, 5])
    with pytest.raises(ConfigError, match=r"^model\.local: FlexLoRA averages products of A and B, and .*lora_B"):
        trained(FlexLoRA, local="lora_B")


# -------------------------------------------------------------------------------------------------------------- FedDPA


@pytest.mark.parametrize("options", [{}, {"alpha": 0.9, "instances": 0}])
def test_the_common_adapters_of_feddpa_are_those_of_fedit(options):
    assert_equal(learners(trained(FedDPA, **options)), learners(trained(FedIT)))


def test_a_mixed_layer_equals_the_formula():
    own, common = LoRALinear(6, 5), LoRALinear(6, 5)
    for layer in (own, common):
        nn.init.normal_(layer.lora_B["default"].weight)
    with torch.no_grad():
        common.weight.copy_(own.weight)
        common.bias.copy_(own.bias)
    x, weight = torch.randn(3, 6), torch.tensor([0.2, 0.9, -0.1])

    def gained(layer):
        return 2 * x.numpy() @ (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach().numpy().T

    plain = x.numpy() @ own.weight.numpy().T + own.bias.numpy()
    expected = plain + weight.numpy()[:, None] * gained(own) + (1 - weight.numpy()[:, None]) * gained(common)
    hook = own.register_forward_hook(MixedLayer(common, Mixing(weight), None), with_kwargs=True)
    np.testing.assert_allclose(own(x).detach(), expected, atol=1e-5)
    hook.remove()
    received = {"lora_B.default.weight": torch.zeros(5, 4)}
    own.register_forward_hook(MixedLayer(common, Mixing(0.25), received), with_kwargs=True)
    np.testing.assert_allclose(own(x).detach(), plain + 0.25 * gained(own), atol=1e-5)


def test_inputs_are_weighed_by_their_mean_cosine_to_the_instances():
    head, known, h = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(5, 4)
    mixing = Mixing(None)
    network = nn.Sequential(nn.Identity(), head)
    network.register_forward_pre_hook(WeighInputs(mixing, head, nn.functional.normalize(known), 0.5), with_kwargs=True)
    network(h)
    a, b = h.numpy(), known.numpy()
    cosines = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(mixing.weight.detach(), 0.5 * cosines.mean(1), atol=1e-6)


def test_what_feddpa_evaluates_equals_the_formula():
    member = trained(FedDPA).clients[1]
    images = next(iter(member.data.val))[0]
    own, common = (learner.backbone.eval() for learner in (member.personal, member.learner))
    drawn = torch.randperm(member.data.num_samples, generator=torch.Generator().manual_seed(1))[:5]
    [(everything, _)] = member.data.train.in_order(10_000)
    with torch.no_grad():
        known, h = (nn.functional.normalize(own.body(x)) for x in (everything[drawn], images))
        weight = 0.5 * (h @ known.T).mean(1, keepdim=True)
        below = own.body[:4](images)
        mixed = torch.relu(weight * own.body[4](below) + (1 - weight) * common.body[4](below))
        expected = own.head(mixed)
        with member.personalized() as learner:
            torch.testing.assert_close(learner(images), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(learner(images), expected, atol=1e-5, rtol=1e-5)  # a second call too
        torch.testing.assert_close(member.standalone()(images), expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(own(images), expected)


def test_the_personal_adapters_train_on_the_mixture_with_what_was_received():
    member = trained(FedDPA, alpha=0.3).clients[0]
    images, labels = next(iter(member.data.train))
    member.received = {A: torch.randn(4, 36), B: torch.randn(8, 4)}
    own, common = member.personal.backbone, member.learner.backbone
    below = own.body[:4](images)
    there = below @ (own.body[4].weight + 2 * member.received[B] @ member.received[A]).T + own.body[4].bias
    z = own.head(torch.relu(0.3 * own.body[4](below) + 0.7 * there))
    expected = nn.functional.cross_entropy(z, labels) + nn.functional.cross_entropy(common(images), labels)
    loss = member.objective((images, labels), 0)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [own.body[4].lora_B["default"].weight, common.body[4].lora_B["default"].weight])
    alone = nn.functional.cross_entropy(common(images), labels)
    torch.testing.assert_close(found[1], torch.autograd.grad(alone, common.body[4].lora_B["default"].weight)[0])
    assert found[0].abs().max() > 0


def test_what_feddpa_cannot_do_is_said():
    class Learner(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.body, self.head = LoRANet(1, 10).body, nn.Linear(8, 10)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match=r"^model\.instances=5: no part of Learner that holds both head and adapters"):
        run(FedDPA(learner=Learner()), data(), rounds=1)
    run(FedDPA(learner=Learner(), instances=0), data(), rounds=1)
    learner = Learner()
    learner.classify, learner.head = learner.head, None
    with pytest.raises(ConfigError, match=r"^model\.head: FedDPA with model\.instances above 0 has to know"):
        FedDPA(learner=learner).build(spec(channels=1, image_size=8))


# ------------------------------------------------------------------------------------------------ what is in the way


@pytest.mark.parametrize("method", ALL)
def test_a_learner_without_adapters_is_refused(method):
    with pytest.raises(
        ConfigError, match=rf"^model\.learner: {method.__name__} trains adapters, and TinyNet has none"
    ) as e:
        run(client(method), data(), rounds=1)
    assert "\n" not in str(e.value)


class Scaled(nn.Linear):
    """A layer with an adapter that has no factors, as IA3's."""

    adapter_layer_names = ("ia3_l",)

    def __init__(self):
        super().__init__(64, 6)
        self.requires_grad_(False)
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(6))})

    def forward(self, x):
        return super().forward(x) * self.ia3_l["default"]


@pytest.mark.parametrize("method", [FFALoRA, FedSALoRA, FlexLoRA])
def test_adapters_without_factors_are_refused(method):
    backbone = lambda channels, classes: Parts(nn.Sequential(nn.Flatten(), Scaled()), nn.Linear(6, classes))  # noqa: E731
    with pytest.raises(ConfigError, match=rf"^model\.learner: {method.__name__} needs the factors A and B of a LoRA"):
        run(of(method, backbone=backbone), data(), rounds=1)
    for other in (FedIT, FedDPA):
        run(of(other, backbone=backbone), data(), rounds=1)


def test_factors_are_found_by_their_names():
    assert lora_factors(LoRANet(1, 10)) == {A.removeprefix("backbone."): B.removeprefix("backbone.")}
    assert list(adapted_layers(LoRANet(1, 10))) == ["body.4"]
    assert lora_factors(nn.Linear(2, 2)) == {}


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize("method", [FFALoRA, FedIT, FedSALoRA, partial(FlexLoRA, ranks=[4, 2]), FedDPA])
def test_around_peft_of_transformers(method, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from adapters import Classifier, Reviews

    torch.manual_seed(0)
    federation = run(method(learner=Classifier(), head=r"\.classifier\."), PerClient(Reviews, num_clients=2), seed=1)
    assert not federation.coordinator.refused
    sent = set(federation.clients[0].upload())
    factors = lora_factors(federation.clients[0].learner)
    assert len(factors) == 6
    kinds = {FFALoRA: set(factors.values()), FedSALoRA: set(factors)}
    assert sent == kinds.get(method, {*factors, *factors.values()})
