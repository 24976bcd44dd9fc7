"""FedSLR against its algorithms in NumPy, a convex problem with a known solution, and what it comes down to."""

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from quadratic import (
    SoftmaxRegression,
    chosen,
    equal,
    flat,
    sgd,
    softmax_regression,
    unequal,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.scores import summary
from lit_pfl.data import Dirichlet
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedSLR
from lit_pfl.methods.factorized.fedslr import GKR, MIXED
from lit_pfl.models import Backbone
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops.low_rank import as_matrix
from tiny import GroupNet, TinyNet, assert_equal, client, digits, run, spec, weights

Weights = dict[str, np.ndarray]


def soft(x, threshold):
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def shrink_singular_values(x, threshold):
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u * np.maximum(s - threshold, 0) @ vt


def matrix_only(shrink):
    """Shrink the (10, 64) weight of a linear classifier with its bias as one vector, the weight alone."""

    def at(w, threshold):
        return np.concatenate([shrink(w[:640].reshape(10, 64), threshold).ravel(), w[640:]])

    return at


COMMON = {"low_rank": matrix_only(shrink_singular_values), "sparse": matrix_only(soft)}
PERSONAL = {"low_rank": matrix_only(shrink_singular_values), "sparse": soft}


def by_the_algorithms(
    problem, participants, clients, *, lam, mu, eta_g, epochs, lr=0.1, decay=0.0, solver="FedSLR", common="low_rank",
    personal="sparse", personal_epochs=1,
):  # fmt: skip
    """Algorithm 2 and its alternatives on problems in all weights as one vector, one step an epoch."""
    w = problem.start
    gamma, p = np.zeros((clients, len(w))), np.zeros((clients, len(w)))
    for ids in participants:
        ends = []
        for k in ids:
            x = w
            for _ in range(epochs - personal_epochs):
                along = problem.gradient(k, x) + decay * x
                if solver == "FedSLR":
                    along = along - gamma[k] + (x - w) / eta_g
                x = x - lr * along
                if solver == "LPGD":
                    x = COMMON[common](x, lr * lam)
            for _ in range(personal_epochs):
                p[k] = PERSONAL[personal](p[k] - lr * (problem.gradient(k, w + p[k]) + decay * p[k]), lr * mu)
            if solver == "FedSLR":
                gamma[k] = gamma[k] + (w - x) / eta_g
            ends.append(x)
        w = np.mean(ends, axis=0) - eta_g * gamma.mean(0)
        if solver != "LPGD":
            w = COMMON[common](w, lam * eta_g)
    return w, gamma, p


OPTIONS = {"lam": 3e-3, "mu": 3e-3, "eta_g": 5.0}


@pytest.mark.seconds
@pytest.mark.few(6)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lam": 0.0, "mu": 0.0},
        {"lam": 0.02, "mu": 0.02, "eta_g": 1.0},
        {"personal_epochs": 2},
        {"decay": 0.05},
        {"solver": "GPGD"},
        {"solver": "LPGD", "lam": 0.05},
        {"common": "sparse"},
        {"personal": "low_rank", "mu": 0.05},
        {"common": "sparse", "personal": "low_rank", "mu": 0.05, "solver": "LPGD"},
        {"server_memory": "each"},
    ],
    ids=str,
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_updates_equal_the_algorithms(options, participation):
    """Algorithm 1 with everybody, Algorithms 2 and 3 with half of the clients, and what else there is."""
    settings = {**OPTIONS, **options}
    decay = settings.pop("decay", 0.0)
    method = softmax_regression(FedSLR, optimizer=sgd(0.1, weight_decay=decay), **settings)
    federation = run(method, unequal(), rounds=5, local_epochs=5, participation=participation)
    settings.pop("server_memory", None)
    problem = SoftmaxRegression(federation)
    w, gamma, p = by_the_algorithms(problem, chosen(federation, 5), 4, epochs=5, decay=decay, **settings)
    server = federation.coordinator.server
    np.testing.assert_allclose(flat(server.model), in_order(server.model, w), atol=2e-5)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(parameters_to_vector(member.personal.parameters()).detach(), p[k], atol=2e-5)
        if member.solver.corrected:
            np.testing.assert_allclose(flat(dict(member.dual.items())), gamma[k], atol=2e-5)
    if settings["mu"] > 0 and settings.get("personal", "sparse") == "sparse":
        assert 0.02 < (p == 0).mean() < 1


def in_order(model, w):
    """Return a vector (weight, bias) in the order of a model's tensors."""
    parts = {"backbone.head.weight": w[:640], "backbone.head.bias": w[640:]}
    return np.concatenate([parts[name] for name in model])


class DoubleNet(TinyNet):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(channels, classes)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.double())


@pytest.mark.slow
def test_algorithms_1_and_3_have_the_same_iterates():
    """Over 20 rounds of some batches, with half of the clients; in double precision, where both round alike."""
    each, mean = (
        run(
            client(FedSLR, backbone=DoubleNet, lam=3e-3, eta_g=5.0, server_memory=memory),
            digits(6, batch_size=120),
            rounds=20,
            local_epochs=2,
            participation=0.5,
        )
        for memory in ("each", "mean")
    )
    a, b = (federation.coordinator.server for federation in (each, mean))
    for name in a.model:
        torch.testing.assert_close(a.model[name], b.model[name], atol=1e-6, rtol=0)
    for k in each.clients:
        for name, tensor in weights(each)[k].items():
            torch.testing.assert_close(tensor, weights(mean)[k][name], atol=1e-6, rtol=0)
    assert len(a.duals) == 6
    assert not b.duals


# ----------------------------------------------------------------------------------------------------- convex recovery


class Nearest(L.LightningModule):
    """A matrix W that minimises ``1/2 |W - M|^2`` for its client's M, whatever the batch."""

    target: np.ndarray

    def __init__(self, targets: np.ndarray, lr: float) -> None:
        super().__init__()
        self.targets, self.lr = targets, lr
        self.matrix = nn.Linear(targets.shape[2], targets.shape[1], bias=False)
        nn.init.zeros_(self.matrix.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.matrix.weight - torch.tensor(self.target).float()).square().sum() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class OfItsClient(Client):
    """What lies below a method: it tells its learner which matrix is the client's."""

    def configure(self, spec: ClientSpec, alone: bool = False) -> None:
        self.learner.target = self.learner.targets[spec.client_id]
        super().configure(spec, alone)


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_recovers_rank_and_support(participation):
    """M_k = L + S_k: w becomes the low-rank part, p_k of every client the sparse one."""
    rng = np.random.default_rng(1)
    clients, rows, columns = 6, 12, 15
    low_rank = 6 * np.linalg.qr(rng.normal(size=(rows, 2))).Q @ np.linalg.qr(rng.normal(size=(columns, 2))).Q.T
    support = rng.random((clients, rows, columns)) < 0.05
    sparse = support * rng.choice([-3.0, 3.0], size=support.shape)
    targets, lam, mu = low_rank + sparse, 2.0, 1.2

    kind: Any = type("Recovering", (FedSLR, OfItsClient), {})
    method = kind(learner=Nearest(targets, lr=0.4), lam=lam, mu=mu, eta_g=1.0, personal_epochs=3)
    federation = run(
        method, digits(clients, batch_size=2000), rounds=15 if participation == 1 else 40, local_epochs=8,
        participation=participation,
    )  # fmt: skip
    w = federation.coordinator.server.model["matrix.weight"].double().numpy()
    np.testing.assert_allclose(w, shrink_singular_values(targets.mean(0), lam), atol=1e-3)
    assert federation.coordinator.server.model.low_rank["matrix.weight"].rank == 2
    for k, member in federation.clients.items():
        p = member.personal.matrix.weight.detach().double().numpy()
        np.testing.assert_allclose(p, soft(targets[k] - w, mu), atol=1e-2)
        np.testing.assert_array_equal(p != 0, support[k])


# ---------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.seconds
def test_without_anything_of_its_own_it_is_fedavg_bit_for_bit():
    slr, fedavg = (
        run(method, equal(2, batches=5), rounds=3, local_epochs=2)
        for method in (client(FedSLR, solver="GPGD", lam=0.0, personal_epochs=0), client(FedAvg))
    )
    assert len(slr.data.indices["train"][0]) == len(slr.data.indices["train"][1])
    sent = slr.coordinator.server.model
    assert_equal(dict(sent), dict(fedavg.coordinator.server.model))
    assert slr.traffic.state_dict() == fedavg.traffic.state_dict()
    assert all(not p.any() for member in slr.clients.values() for p in member.personal.parameters())


@pytest.mark.seconds
def test_a_personal_component_changes_nothing_about_the_common_model():
    """Full batches, so that what the personal epoch draws does not matter."""
    runs = [
        run(softmax_regression(FedSLR, lam=2e-3, mu=mu, personal_epochs=n), equal(4), rounds=3, local_epochs=3 + n)
        for mu, n in ((0.0, 0), (1e-3, 1), (10.0, 2))
    ]
    for other in runs[1:]:
        np.testing.assert_allclose(
            flat(other.coordinator.server.model), flat(runs[0].coordinator.server.model), atol=1e-5
        )


@pytest.mark.seconds
def test_large_penalties_leave_one_component_alone():
    """Tables 7 and 8."""
    nothing_common = run(client(FedSLR, lam=10.0), rounds=2, local_epochs=2)
    for name, tensor in nothing_common.coordinator.server.model.items():
        assert tensor.any() == (tensor.dim() < 2), name
    assert all(factors.rank == 0 for factors in nothing_common.coordinator.server.model.low_rank.values())
    nothing_personal = run(client(FedSLR, mu=1e3), rounds=2, local_epochs=2)
    assert not any(p.any() for member in nothing_personal.clients.values() for p in member.personal.parameters())


class WithoutBiases(Backbone):
    """A network of matrices alone: where all are zero, nothing has a gradient."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(nn.Conv2d(channels, 16, 3, stride=2, bias=False), nn.ReLU(), nn.Flatten())
        super().__init__(body, nn.Linear(144, classes, bias=False))


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("p_init", ["zero", "copy"])
def test_with_nothing_common_a_client_learns_only_if_p_starts_as_a_copy(p_init):
    """Table 7: after round 1 all matrices of w are zero, and if p is zero too, so is every gradient."""
    method = client(FedSLR, backbone=WithoutBiases, lam=10.0, p_init=p_init, optimizer=sgd(0.1), scheduler=None)
    data = digits(4, batch_size=16, evaluate_on="all")
    federation = run(method, data, rounds=8, local_epochs=3, participation=0.25, evaluate="after")
    [first], *later = chosen(federation, 8)
    late = {client for [client] in later if client != first}
    assert len(late) > 1
    accuracies = {row.client: row.scores["acc"] for row in federation.rows if row.model.startswith(MIXED)}
    for k in late:
        member = federation.clients[k]
        member.download(federation.coordinator.server.evaluation_reply(k))
        assert not any(w.any() for w in member.learner.parameters())
        with member.personalized() as network, torch.enable_grad():
            images, labels = next(iter(member.data.train))
            nn.functional.cross_entropy(network(images), labels).backward()
            learns = {bool(weight.grad.any()) for weight in network.parameters()}
        assert learns == {p_init == "copy"}
        assert (accuracies[k] > 0.5) == (p_init == "copy"), accuracies
        assert {bool(p.any()) for p in member.personal.parameters()} == {p_init == "copy"}


# ------------------------------------------------------------------------------------------------------------ payloads


@pytest.mark.seconds
def test_the_server_shrinks_every_layer_as_the_paper_s_matrix():
    """(O, I, h, w) with the middle axes exchanged, then O h rows and I w columns; vectors are only averaged."""
    method = client(FedSLR, solver="GPGD", lam=0.03, eta_g=10.0, optimizer=sgd(0.1))
    federation = run(method, digits(2), rounds=1, local_epochs=2)
    before = run(client(FedSLR, solver="GPGD", lam=0.0, optimizer=sgd(0.1)), digits(2), rounds=1, local_epochs=2)
    server = federation.coordinator.server
    for name, mean in before.coordinator.server.model.items():
        expected = mean.double().numpy()
        if mean.dim() == 4:
            o, i, h, w = mean.shape
            matrix = shrink_singular_values(expected.swapaxes(1, 2).reshape(o * h, i * w), 0.3)
            expected = matrix.reshape(o, h, i, w).swapaxes(1, 2)
        elif mean.dim() == 2:
            expected = shrink_singular_values(expected, 0.3)
        np.testing.assert_allclose(server.model[name], expected, atol=1e-6)
    rank = server.model.low_rank["backbone.body.0.weight"].rank
    assert rank == np.linalg.matrix_rank(as_matrix(server.model["backbone.body.0.weight"]).numpy(), tol=1e-6)


def sent_both_ways(**options):
    federation = run(client(FedSLR, **options), digits(2), rounds=2, local_epochs=2)
    return federation, federation.clients[0].upload(), federation.coordinator.server.reply(0)


@pytest.mark.seconds
def test_replies_are_in_factors_where_these_are_smaller():
    federation, upload, reply = sent_both_ways(lam=0.08)
    full = sum(t.numel() for t in upload.values())
    counted = sum(
        min(t.numel(), reply.low_rank[name].rank * sum(as_matrix(t).shape)) if t.dim() > 1 else t.numel()
        for name, t in reply.items()
    )
    assert reply.elements == counted < full
    assert upload.elements == full
    # round 1: all is dense; round 2: what round 1 left
    first = run(client(FedSLR, lam=0.08), digits(2), rounds=1, local_epochs=2)
    assert first.traffic.elements == 2 * 2 * full
    assert federation.traffic.elements == 2 * 2 * full + 2 * (full + first.coordinator.server.reply(0).elements)


@pytest.mark.seconds
def test_uploads_are_in_factors_where_clients_shrink(monkeypatch):
    seen = []
    upload = FedSLR.upload
    monkeypatch.setattr(FedSLR, "upload", lambda self: seen.append(upload(self)) or seen[-1])
    federation, *_ = sent_both_ways(solver="LPGD", lam=1.0)
    assert not federation.coordinator.server.model.low_rank
    trained = [payload for payload in seen if payload.low_rank]
    assert len(trained) == 4
    for payload in trained:
        assert payload.elements < sum(t.numel() for t in payload.values())


@pytest.mark.seconds
def test_sparse_common_models_travel_sparse():
    _, _, reply = sent_both_ways(common="sparse", lam=5e-3)
    assert not reply.low_rank
    assert reply.sparse == {name for name, t in reply.items() if t.dim() > 1}
    zeros = sum(int((t == 0).sum()) for t in reply.values())
    assert zeros > 5
    assert reply.elements == sum(t.numel() for t in reply.values()) - zeros


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.seconds
@pytest.mark.parametrize("evaluate", ["before", "after"])
@pytest.mark.parametrize("backbone", [TinyNet, GroupNet])
def test_both_models_are_evaluated(evaluate, backbone):
    method = client(FedSLR, backbone=backbone, lam=0.08, mu=1e-2)
    federation = run(method, digits(3), rounds=3, local_epochs=3, evaluate=evaluate, participation=2)
    assert [(row.client, row.model) for row in federation.rows] == [
        (k, f"{model}:{evaluate}") for k in range(3) for model in (MIXED, GKR)
    ]
    for row in federation.rows:
        member = federation.clients[row.client]
        if evaluate == "after":
            member.download(federation.coordinator.server.reply(row.client))
        plain = backbone(1, 10)
        parameters = {}
        for name, w in member.backbone.named_parameters():
            p = member.personal.backbone.get_parameter(name)
            parameters[name] = (w + p if row.model.startswith(MIXED) else w).detach()
        own = member.personal.backbone if row.model.startswith(MIXED) else member.backbone
        plain.load_state_dict({**own.state_dict(), **parameters})
        plain.eval()
        correct = sum(int((plain(x).argmax(1) == y).sum()) for x, y in federation.data.client(row.client).test)
        assert row.scores["acc"] == pytest.approx(correct / row.n, abs=1e-6)
        nonzero = sum(int((p != 0).sum()) for p in member.personal.parameters())
        common = member.common_parameters.item()
        assert row.sizes["parameters"] == common + nonzero * row.model.startswith(MIXED)
    if evaluate == "after":
        assert common == federation.coordinator.server.reply(0).elements
        assert common < sum(p.numel() for p in member.backbone.parameters())
    metrics = summary(federation.rows, "test", {"acc": True})
    for prefix, model in (("test", MIXED), ("test/GKR", GKR)):
        rows = [row for row in federation.rows if row.model.startswith(model)]
        assert metrics[f"{prefix}/acc"] == pytest.approx(np.mean([row.scores["acc"] for row in rows]))
        assert metrics[f"{prefix}/acc_std"] == pytest.approx(np.std([row.scores["acc"] for row in rows]))
        count = metrics[f"{prefix.replace('test', 'model')}/parameters"]  # no score, of no split
        assert count == pytest.approx(np.mean([row.sizes["parameters"] for row in rows]))


@pytest.mark.seconds
def test_the_personal_component_learns_what_the_common_model_lacks():
    method = client(FedSLR, backbone=GroupNet, lam=0.02, mu=1e-4, optimizer=sgd(0.5))
    data = digits(4, partition=Dirichlet(alpha=0.2))
    federation = run(method, data, rounds=4, local_epochs=4, evaluate="after")
    accuracies = summary(federation.rows, "test", {"acc": True})
    assert accuracies["test/acc"] > accuracies["test/GKR/acc"] + 0.05


def test_the_initial_component_is_zero_or_as_in_the_released_code():
    task = spec(channels=1, image_size=8, local_epochs=2)
    for init in ("zero", "copy"):
        member = client(FedSLR, backbone=GroupNet, p_init=init).build(task).eval()
        images = torch.randn(3, 1, 8, 8)
        twice = GroupNet(1, 10)
        for (name, w), (_, other) in zip(member.backbone.named_parameters(), twice.named_parameters(), strict=True):
            other.data = w.data * (2 if init == "copy" and name != "body.1.weight" else 1)
        with member.as_evaluated(MIXED) as mixed:
            assert torch.equal(mixed(images), twice(images))
        with member.as_evaluated(GKR) as common:
            assert torch.equal(common(images), member.backbone(images))


# --------------------------------------------------------------------------------------------------------------- state


@pytest.mark.seconds
def test_heads_at_home_have_no_dual_variable_and_are_trained():
    federation = run(client(FedSLR), digits(3, permute_labels=True), rounds=2, local_epochs=2)
    heads = []
    for member in federation.clients.values():
        assert not [name for name in [*member.upload(), *member.dual] if ".head." in name]
        heads.append(member.backbone.head.weight)
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.seconds
def test_between_rounds_a_client_is_where_the_round_began_and_keeps_no_copies():
    federation = run(client(FedSLR, lam=0.01), digits(2), rounds=2, local_epochs=2)
    before = run(client(FedSLR, lam=0.01), digits(2), rounds=1, local_epochs=2).coordinator.server.model
    for member in federation.clients.values():
        assert member.received == member._trained == {}
        for name, weight in member.shared_weights().items():
            assert torch.equal(weight, before[name])


def test_errors():
    task = spec(channels=1, image_size=8)
    with pytest.raises(ConfigError, match=r"model\.personal_epochs=1 leaves none of federation\.local_epochs=1"):
        client(FedSLR).build(task)
    with pytest.raises(ConfigError, match=r"model\.factorization: FedSLR"):
        client(FedSLR, factorization=Factorization())
