"""FedCAC against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed

from lit_pfl.core import ClientInfo, Payload
from lit_pfl.methods import FedCAC
from lit_pfl.methods.similarity.fedcac import CRITICAL, FedCACServer, critical, overlaps, partners
from lit_pfl.ops import pack_bits, unpack_bits
from tiny import assert_equal, client, digits, run

SHAPES = {"a": torch.Size([3, 4]), "b": torch.Size([5])}


def expected_marks(weight: np.ndarray, before: np.ndarray, tau: float) -> np.ndarray:
    metric = np.abs((weight - before) * weight)
    count = int(tau * metric.size)
    least = np.sort(metric.ravel())[::-1][count - 1] if count else np.inf
    if least <= 1e-10 and (metric > 1e-20).any():
        least = metric[metric > 1e-20].min()
    return metric >= least


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("still", [0, 9, 12])
def test_marks_equal_the_formula(tau, still):
    rng = np.random.default_rng(0)
    before, weight = rng.normal(size=(2, 12))
    weight[:still] = before[:still]
    found = critical(torch.tensor(weight).view(3, 4), torch.tensor(before).view(3, 4), tau)
    np.testing.assert_array_equal(found.numpy().ravel(), expected_marks(weight, before, tau))


def test_rounds_equal_the_formula():
    """Everybody in the first round, some in the others; what the server has of who is absent goes on to count."""
    rng, n, beta = np.random.default_rng(1), np.array([10, 20, 30, 40]), 4
    server = FedCACServer(SHAPES, beta)

    def sent() -> dict[str, np.ndarray]:
        marks = {f"{name}?": rng.random(shape) < 0.5 for name, shape in SHAPES.items()}
        return {name: rng.normal(size=shape) for name, shape in SHAPES.items()} | marks

    def payload(upload: dict[str, np.ndarray]) -> Payload:
        marks = pack_bits(torch.tensor(upload[f"{name}?"]) for name in SHAPES)
        return Payload({**{name: torch.tensor(upload[name]) for name in SHAPES}, CRITICAL: marks})

    server.start({k: ClientInfo(int(n[k]), payload(sent())) for k in range(4)})
    latest, sizes = {}, set()
    for round, taking in enumerate([[0, 1, 2], [0, 1, 2], [1, 2], [0, 2], [2]], 1):
        uploads = {k: sent() for k in taking}
        server.aggregate(round, {k: payload(upload) for k, upload in uploads.items()})
        latest |= uploads
        common = {name: np.average([uploads[k][name] for k in taking], axis=0, weights=n[taking]) for name in SHAPES}
        marks = {k: np.concatenate([u[f"{name}?"].ravel() for name in SHAPES]).astype(int) for k, u in latest.items()}
        overlap = {
            (i, j): 1 - np.abs(marks[i] - marks[j]).sum() / (2 * marks[i].sum()) for i in marks for j in marks if i != j
        }
        mean, largest = np.mean(list(overlap.values())), max(overlap.values())
        for i in range(4):
            reply = server.reply(i)
            assert reply.keys() == SHAPES.keys()
            chosen = [j for j in latest if j == i or overlap[i, j] >= mean + round / beta * (largest - mean)] if (
                i in latest) else []  # fmt: skip
            sizes.add(len(chosen))
            for name in SHAPES:
                expected = common[name]
                if i in latest:
                    mixed = np.mean([latest[j][name] for j in chosen], axis=0)
                    expected = np.where(latest[i][f"{name}?"], mixed, expected)
                np.testing.assert_allclose(reply[name], expected, rtol=1e-12)
    assert sizes > {0, 1}


def test_partners():
    marks = [{"a": torch.tensor(row, dtype=torch.bool)} for row in ([1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1])]
    expected = torch.tensor([[1, 1, 0.25], [1, 1, 0.25], [0.5, 0.5, 1]]).double()
    assert torch.equal(overlaps(marks), expected)
    pair = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    assert torch.equal(partners(expected, 0.0), pair)
    assert torch.equal(partners(expected, 2.0), torch.eye(3, dtype=torch.bool))
    assert torch.equal(partners(torch.ones(1, 1).double(), 0.5), torch.eye(1, dtype=torch.bool))


def test_what_a_client_marks():
    """Of every tensor of its own, by what it received and what it sends."""
    before, after = (run(client(FedCAC, tau=0.3), skewed(), rounds=rounds) for rounds in (1, 2))
    for k, member in after.clients.items():
        received = before.coordinator.server.reply(k)
        shapes = {name: weight.shape for name, weight in member.shared_weights().items()}
        marks = unpack_bits(member.critical, shapes)
        for name, weight in member.shared_weights().items():
            assert torch.equal(marks[name], critical(weight.detach(), received[name], 0.3))
        assert 0.2 < float(torch.cat([m.flatten() for m in marks.values()]).float().mean()) < 0.4


def test_critical_weights_of_a_client_without_partners_are_its_own():
    federation = run(client(FedCAC, beta=1), skewed(), rounds=3)
    for k, member in federation.clients.items():
        sent, reply = member.upload(), federation.coordinator.server.reply(k)
        own = unpack_bits(member.critical, {name: weight.shape for name, weight in member.shared_weights().items()})
        assert_equal({n: reply[n][mask] for n, mask in own.items()}, {n: sent[n][mask] for n, mask in own.items()})


def test_labels_that_differ_keep_heads_at_home():
    federation = run(client(FedCAC), digits(3, permute_labels=True), rounds=2)
    assert not [name for name in federation.coordinator.server.reply(0) if "head" in name]
