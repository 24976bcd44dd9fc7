"""Servers with a module of their own: pFedHN, FedGen and FedGH against their formulas."""

import copy

import numpy as np
import pytest
import torch
from heads import learners, skewed, softmax
from torch import nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.errors import ConfigError
from lit_pfl.methods import CCVR, FedGen, FedGH, PFedHN, StandAlone
from lit_pfl.methods.knowledge.fedgen import GENERATOR, Generator, diversity, teacher_loss
from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES
from lit_pfl.methods.partial.fedgh import HEAD, FedGHServer
from lit_pfl.methods.similarity.pfedhn import HyperNetwork, PFedHNServer
from tiny import TinyNet, client, momentum_sgd, run, weights

# -------------------------------------------------------------------------------------------------------------- pFedHN


class Table(nn.Module):
    """An embedding for every client that is all of its weights."""

    def __init__(self, clients, shapes, first):
        super().__init__()
        self.shapes = shapes
        self.embeddings = nn.Embedding(clients, len(first))
        with torch.no_grad():
            self.embeddings.weight.copy_(first.expand(clients, -1))

    def forward(self, place):
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = self.embeddings.weight[place].split(sizes)
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


class Copies(PFedHNServer):
    def make(self, clients):
        first = {name: x for name, x in clients[0].initial.items() if name in self.weights}
        table = Table(
            len(clients), {n: x.shape for n, x in first.items()}, torch.cat([x.flatten() for x in first.values()])
        )
        return table, torch.optim.SGD(table.parameters(), lr=float(len(clients)))  # for the mean over as many


class Remembering(PFedHN):
    def configure_server(self):
        server = super().configure_server()
        server.__class__ = Copies
        server.clip = 1e9
        return server


@pytest.mark.seconds
def test_with_an_embedding_of_all_weights_every_client_stands_alone():
    a = run(client(Remembering, optimizer=momentum_sgd), skewed(), rounds=3)
    b = run(client(StandAlone, optimizer=momentum_sgd, reset_optimizer=True), skewed(), rounds=3)
    for k, tensors in weights(b).items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(learners(a)[k][name], tensor, atol=1e-5, rtol=1e-4)


def hypernetwork_server(**options):
    method = PFedHN(hidden_dim=6, hidden_layers=1, embedding_dim=2, **options)
    server = PFedHNServer(frozenset({"a", "b"}), method, seed=4)
    torch.manual_seed(0)
    initial = {"a": torch.randn(2, 3), "b": torch.randn(4), "running": torch.ones(2)}
    server.start({k: ClientInfo(10 + k, Payload(initial)) for k in (0, 3, 7)})
    return server


def test_the_gradient_is_that_of_half_the_squared_distance():
    """Whose derivative by finite differences it is."""
    server = hypernetwork_server(server_lr=0.5, server_momentum=0.0, server_weight_decay=0.0)
    server.module.double()
    sent = {k: {n: x.double() + 0.1 * (k + 1) for n, x in server.reply(k).items()} for k in (0, 7)}
    before = copy.deepcopy(server.module)

    def distance(module):
        made = [(module(server.places[k]), sent[k]) for k in sent]
        return sum(((m[n] - target[n]) ** 2).sum() for m, target in made for n in m) / 2 / len(sent)

    server.aggregate(1, {k: Payload(tensors) for k, tensors in sent.items()})
    for name, parameter in before.named_parameters():
        stepped = (parameter - server.module.get_parameter(name)) / 0.5
        place = tuple(0 for _ in parameter.shape)
        values = []
        for delta in (1e-6, -1e-6):
            moved = copy.deepcopy(before)
            with torch.no_grad():
                moved.get_parameter(name)[place] += delta
                values.append(float(distance(moved)))
        assert float(stepped[place]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-5)


def test_gradients_are_clipped_and_others_averaged():
    server = hypernetwork_server(server_lr=1.0, server_momentum=0.0, server_weight_decay=0.0, server_clip=0.01)
    before = [parameter.detach().clone() for parameter in server.module.parameters()]
    uploads = {
        k: Payload({"a": torch.full((2, 3), 9.0), "b": torch.zeros(4), "running": torch.full((2,), float(k))})
        for k in (0, 3)
    }
    server.aggregate(1, uploads)
    step = torch.cat([(a - b).flatten() for a, b in zip(before, server.module.parameters(), strict=True)])
    assert float(step.norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(server.reply(7)["running"], torch.full((2,), 3 * 13 / 23))


def test_the_network_is_the_paper_s():
    module = HyperNetwork(5, 2, 100, 3, {"a": (2, 3)})
    assert [tuple(layer.weight.shape) for layer in module.body if isinstance(layer, nn.Linear)] == [
        (100, 2), (100, 100), (100, 100), (100, 100)]  # fmt: skip
    assert module(1)["a"].shape == (2, 3)
    assert not torch.equal(module(1)["a"], module(2)["a"])


def test_heads_may_stay_at_home():
    federation = run(client(PFedHN, personal_head=True), skewed(), rounds=1)
    assert not [name for name in federation.coordinator.server.reply(0) if ".head." in name]
    assert [name for name in run(client(PFedHN), skewed(), rounds=1).coordinator.server.reply(0) if ".head." in name]


def test_a_network_that_is_too_large_is_refused():
    with pytest.raises(ConfigError, match=r"model.hidden_dim=10000000: the hypernetwork would have .* use a smaller"):
        run(client(PFedHN, hidden_dim=10_000_000), skewed(), rounds=1)


# -------------------------------------------------------------------------------------------------------------- FedGen


def test_the_teacher_s_loss_equals_the_formula():
    rng = np.random.default_rng(0)
    z, y, n = rng.normal(size=(3, 5, 4)), rng.integers(0, 4, 5), rng.integers(0, 9, (3, 4))
    expected = 0.0
    for i in range(3):
        for b in range(5):
            expected -= n[i, y[b]] / n[:, y[b]].sum() * np.log(softmax(z[i])[b, y[b]]) / 5
    assert float(teacher_loss(iter(torch.tensor(z)), torch.tensor(y), torch.tensor(n))) == pytest.approx(expected)


def test_diversity_equals_the_formula():
    rng = np.random.default_rng(0)
    g, e = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    pairs = [np.abs(g[i] - g[j]).mean() * ((e[i] - e[j]) ** 2).mean() for i in range(4) for j in range(4)]
    assert float(diversity(torch.tensor(g), torch.tensor(e))) == pytest.approx(np.exp(-np.mean(pairs)))


@pytest.mark.seconds
def test_the_client_s_objective_equals_the_formula():
    federation = run(client(FedGen, gen_batch_size=8), skewed(), rounds=2)
    member = federation.clients[0]
    member.download(federation.coordinator.server.reply(0))
    images, labels = next(iter(member.data.train))
    member.eval()
    member.completed.fill_(3)
    torch.manual_seed(5)
    of_batch, drawn = torch.rand(len(labels), 32), torch.randint(int((member.occurring > 0).sum()), (8,))
    drawn, of_drawn = member.occurring.nonzero()[:, 0][drawn], torch.rand(8, 32)
    scale = 10 * 0.98**3
    head, generator = member.backbone.head, member.generator
    with torch.no_grad():
        q = head(generator(labels, of_batch)).softmax(1)
    log_p = member.backbone(images).log_softmax(1)
    expected = (
        nn.functional.cross_entropy(member.backbone(images), labels)
        + scale * (q * (q.log() - log_p)).sum(1).mean()
        + scale * 8 / len(labels) * nn.functional.cross_entropy(head(generator(drawn, of_drawn)), drawn)
    )
    torch.manual_seed(5)
    torch.testing.assert_close(member.objective((images, labels), 0), expected)
    reply = federation.coordinator.server.reply(0)
    for name, tensor in member.generator.state_dict().items():
        assert torch.equal(reply[GENERATOR + name], tensor)


@pytest.mark.seconds
def test_a_short_last_batch_has_the_weight_of_the_others():
    federation = run(client(FedGen, gen_batch_size=8, beta=0.0), skewed(batch_size=16), rounds=2)
    member = federation.clients[0]
    images, labels = (part[:2] for part in next(iter(member.data.train)))
    assert len(member.data.train) > 1
    member.eval()

    def added(batch_size):
        member.__dict__["batch_size"] = batch_size
        torch.manual_seed(5)
        return float(member.objective((images, labels), 0)) - float(nn.functional.cross_entropy(member(images), labels))

    assert added(member.batch_size) == pytest.approx(added(None) * 2 / 16, rel=1e-3)


@pytest.mark.slow
def test_the_generator_learns_what_the_heads_know():
    federation = run(client(FedGen, generator_steps=300, generator_lr=1e-2, eta=0.0), skewed(), rounds=2)
    server, sent = federation.coordinator.server, federation.clients[0].upload()
    labels, untrained = torch.arange(10)[sent[COUNTS] > 5], Generator(*server.sizes).eval()
    noise = torch.rand(len(labels), 32)
    counts = torch.stack([member.upload()[COUNTS] for member in federation.clients.values()])

    def loss(generator):
        with torch.no_grad():
            heads = (member.backbone.head(generator(labels, noise)) for member in federation.clients.values())
            return float(teacher_loss(heads, labels, counts))

    assert loss(server.module.eval()) < 0.5 * loss(untrained)


def test_heads_that_stay_at_home_or_have_batch_norm_are_refused():
    with pytest.raises(ConfigError, match="FedGen uses the clients' heads"):
        run(client(FedGen, share_head=False), skewed(), rounds=1)

    class Normed(TinyNet):
        def __init__(self, channels, classes):
            super().__init__(channels, classes)
            self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, classes))

    for method in (CCVR, FedGen, FedGH):
        with pytest.raises(ConfigError, match=f"{method.__name__} trains heads on .*, for which batch norm is unfit"):
            run(client(method, backbone=Normed), skewed(), rounds=1)


def test_a_generator_with_batch_norm_is_not_trained_on_single_samples():
    with pytest.raises(ConfigError, match=r"^model.gen_batch_size=1: .* needs 2 or more"):
        client(FedGen, gen_batch_size=1)


# --------------------------------------------------------------------------------------------------------------- FedGH


def test_the_server_s_head_takes_the_steps_of_softmax_regression():
    torch.manual_seed(0)
    head = nn.Linear(4, 3)
    server = FedGHServer(head, lr=0.3, batch_size=100)
    means = {k: torch.randn(3, 4) for k in (0, 1)}
    counts = {0: torch.tensor([5, 0, 2]), 1: torch.tensor([0, 1, 1])}
    uploads = {k: Payload({PROTOTYPES: means[k], COUNTS: counts[k]}) for k in (0, 1)}
    server.start({k: ClientInfo(8, upload) for k, upload in uploads.items()})
    x = np.stack([means[0][0], means[0][2], means[1][1], means[1][2]]).astype(float)
    y = np.eye(3)[[0, 2, 1, 2]]
    w, b = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
    for round in (1, 2):
        server.aggregate(round, uploads)
        by_logit = (softmax(x @ w.T + b) - y) / 4
        w, b = w - 0.3 * by_logit.T @ x, b - 0.3 * by_logit.sum(0)
        np.testing.assert_allclose(server.reply(0)[HEAD + "weight"], w, atol=1e-6)
        np.testing.assert_allclose(server.reply(1)[HEAD + "bias"], b, atol=1e-6)


def test_clients_get_the_server_s_head_and_keep_their_bodies():
    federation = run(client(FedGH), skewed(), rounds=2)
    bodies = {k: member.backbone.body[0].weight.clone() for k, member in federation.clients.items()}
    for k, member in federation.clients.items():
        member.download(federation.coordinator.server.reply(k))
        assert torch.equal(member.backbone.head.weight, federation.coordinator.server.module.weight)
        assert torch.equal(member.backbone.body[0].weight, bodies[k])
    assert not torch.equal(bodies[0], bodies[1])
    assert set(federation.clients[0].upload()) == {PROTOTYPES, COUNTS}
