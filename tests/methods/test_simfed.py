"""SimFed against its formulas."""

from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import SimFed
from lit_pfl.methods.similarity.simfed import EMBEDDING, SimFedServer
from lit_pfl.nn.factorization import Factorization
from tiny import Learner, client, run, weights


def payloads(num_clients: int, spread: float = 0.3) -> dict[int, Payload]:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(8, generator=generator)
    return {
        k: Payload({
            "u": torch.randn(5, 1, generator=generator),
            "mu": torch.randn(4, 3, generator=generator),
            "embedding": base + spread * torch.randn(8, generator=generator),
        })
        for k in range(num_clients)
    }  # fmt: skip


def start(server: SimFedServer, uploads: dict[int, Payload]) -> SimFedServer:
    server.start({k: ClientInfo(10, upload) for k, upload in uploads.items()})
    return server


def by_the_formulas(uploads: dict[int, Payload], tau: float, alpha: float, name: str) -> np.ndarray:
    """Eq. 3 and 8 in NumPy: zeta_k + sum_j softmax(alpha sigma)_j (zeta_j - zeta_k)."""
    z = np.stack([upload["embedding"].numpy().astype(np.float64) for upload in uploads.values()])
    theta = np.stack([upload[name].numpy().astype(np.float64) for upload in uploads.values()])
    new = []
    for k in range(len(z)):
        sigma = z @ z[k] / (np.linalg.norm(z, axis=1) * np.linalg.norm(z[k]))
        matched = [j for j in range(len(z)) if sigma[j] >= tau or j == k]
        scores = np.exp(alpha * (sigma[matched] - sigma[matched].max()))
        update = sum(w * (theta[j] - theta[k]) for w, j in zip(scores / scores.sum(), matched, strict=True))
        new.append(theta[k] + update)
    return np.stack(new)


@pytest.mark.parametrize(("tau", "alpha"), [(0.9, 30.0), (0.0, 1.0), (0.85, 5.0)])
def test_the_server_step_equals_the_formulas(tau, alpha):
    uploads = payloads(7)
    server = start(SimFedServer(tau, alpha, {"criteria_input": torch.zeros(1)}), uploads)
    server.aggregate(1, uploads)
    matched = (server.weights > 0).sum(1)
    assert tau == 0.0 or (matched.min() < 7 and matched.max() > 1)  # the thresholds do divide these clients
    for name in ("u", "mu"):
        replies = np.stack([server.reply(k)[name].numpy() for k in uploads])
        np.testing.assert_allclose(replies, by_the_formulas(uploads, tau, alpha, name), atol=1e-6)
    assert set(server.reply(0)) == {"u", "mu"}


def test_equal_embeddings_give_the_plain_mean():
    uploads = {k: Payload({**upload, "embedding": torch.ones(8)}) for k, upload in payloads(6).items()}
    server = start(SimFedServer(0.9, 30.0, {"criteria_input": torch.zeros(1)}), uploads)
    server.aggregate(1, uploads)
    mean = torch.stack([upload["mu"] for upload in uploads.values()]).mean(0)
    torch.testing.assert_close(server.reply(3)["mu"], mean, atol=1e-6, rtol=0)


def test_clients_that_do_not_take_part_are_matched_by_their_latest_upload():
    uploads = payloads(5)
    server = start(SimFedServer(0.0, 1.0, {"criteria_input": torch.zeros(1)}), uploads)
    server.aggregate(1, {k: uploads[k] for k in (0, 1, 2)})
    assert server.reply(4)["u"] is server.model["u"]  # never seen: the initial tensors
    later = {3: uploads[3], 0: Payload({**uploads[0], "u": uploads[0]["u"] + 1})}
    server.aggregate(2, later)
    latest = {0: later[0], 1: uploads[1], 2: uploads[2], 3: uploads[3]}
    expected = by_the_formulas(latest, 0.0, 1.0, "u")
    np.testing.assert_allclose(server.reply(1)["u"].numpy(), expected[1], atol=1e-6)


def test_what_a_client_does_after_its_upload_changes_no_reply():
    uploads = payloads(3)
    server = start(SimFedServer(0.0, 1.0, {"criteria_input": torch.zeros(1)}), uploads)
    server.aggregate(1, uploads)
    before = server.reply(1)["u"].clone()
    uploads[0]["u"].add_(100)
    assert torch.equal(server.reply(1)["u"], before)


def test_lambda_zero_and_no_scale_is_the_mean_of_all():
    """alpha = 0 weighs all alike; after the last round every client is as it was uploaded."""
    federation = run(client(SimFed, tau=-1.0, alpha=0.0, factorization=Factorization(l1=0.0)), rounds=2)
    shared = [member.shared_parameters() for member in federation.clients.values()]
    for name in shared[0]:
        mean = torch.stack([tensors[name] for tensors in shared]).mean(0)
        torch.testing.assert_close(federation.coordinator.server.reply(2)[name], mean, atol=1e-6, rtol=0)


def test_the_criteria_input_travels_once_and_embeddings_every_round():
    federation = run(client(SimFed), rounds=3)
    inputs = [member.criteria_input["criteria_input"] for member in federation.clients.values()]
    assert all(torch.equal(x, inputs[0]) for x in inputs)
    assert abs(float(inputs[0].std()) - 1) < 0.5
    server, member = federation.coordinator.server, federation.clients[0]
    assert "criteria_input" in server.model
    assert "criteria_input" not in server.reply(0)
    assert member.upload()["embedding"].shape == (16,)
    ledger = federation.coordinator.ledger.clients[0]
    assert ledger[0] < ledger[1] + 3 * 4 * 16 + 3 * 200


@pytest.mark.seconds
def test_factorized_weights_and_the_l1_term_are_there():
    federation = run(client(SimFed), rounds=1)
    names = set(federation.clients[0].shared_parameters())
    assert {"backbone.body.0.u", "backbone.body.0.v", "backbone.body.0.mu", "backbone.head.mu"} <= names
    dense = run(client(SimFed, factorization=None), rounds=1)
    assert "backbone.body.0.weight" in dense.clients[0].shared_parameters()


def test_the_l1_term_shrinks_mu():
    free = run(client(SimFed, factorization=Factorization(l1=0.0)), rounds=2)
    penalised = run(client(SimFed, factorization=Factorization(l1=1e-2)), rounds=2)
    norms = [
        sum(float(t.abs().sum()) for n, t in weights(f)[0].items() if n.endswith(".mu")) for f in (free, penalised)
    ]
    assert norms[1] < 0.7 * norms[0]


def test_the_gradient_of_the_l1_term_is_lambda_times_sign():
    federation = run(client(SimFed, factorization=Factorization(l1=0.25)), rounds=1)
    member = federation.clients[0]
    images, labels = next(iter(federation.data.client(0).val))
    member.eval()
    gradients = []
    for l1 in (0.0, 0.25):
        member.factorization = Factorization(l1=l1)
        member.zero_grad()
        member.objective((images, labels), 0).backward()
        gradients.append(member.backbone.body[0].mu.grad.clone())
    torch.testing.assert_close(gradients[1] - gradients[0], 0.25 * member.backbone.body[0].mu.detach().sign())


def test_embeddings_of_different_sizes_are_told_by_client_before_anybody_trains():
    server = SimFedServer(0.9, 30.0, {"noise": torch.zeros(1)})
    clients = {k: ClientInfo(5, Payload({"w": torch.zeros(2), EMBEDDING: torch.zeros(4 + k)})) for k in range(2)}
    with pytest.raises(ConfigError, match=r"^model\.encoder: client 1's embedding has 5 numbers and client 0's 4, so"):
        server.start(clients)


@dataclass
class Open:
    x: torch.Tensor


class Opaque:
    """What nobody looks into."""

    def __init__(self, x):
        self.x = x


class Taken(nn.Module):
    def forward(self, given):
        return given.x


class Held(L.LightningDataModule):
    """Batches whose input is in an object."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        images = torch.randn(8, 1, 64)
        return DataLoader([(self.kind(image), torch.tensor([3])) for image in images], batch_size=None)


@pytest.mark.parametrize("kind", [Open, Opaque])
def test_noise_that_does_not_come_to_the_encoder_is_refused(kind):
    """What that embeds would be each client's own first sample."""
    learner = Learner(nn.Sequential(Taken(), nn.Linear(64, 8)), nn.Linear(8, 10), lr=0.0)
    method, data = client(SimFed, learner=learner, factorization=None), PerClient([Held(kind), Held(kind)])
    if kind is Open:
        first, second = (member.embedding() for member in run(method, data, rounds=1).clients.values())
        assert torch.equal(first, second)
    else:
        with pytest.raises(ConfigError, match=r"^model\.encoder: .* this part of Learner gets has none that"):
            run(method, data)
