"""FedPAC against its formulas."""

import numpy as np
import pytest
import torch
from heads import features, learners, skewed, whole_data

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedPAC, FedRep
from lit_pfl.methods.partial.fedpac import COUNTS, MEANS, PROTOTYPES, VARIANCE, FedPACServer, head_weights, statistics
from lit_pfl.ops import smallest_on_simplex
from tiny import assert_equal, client, run, weights


def test_without_the_term_and_with_every_head_its_own_it_is_fedrep(monkeypatch):
    monkeypatch.setattr(FedPACServer, "weights_of_heads", lambda self, sent: torch.eye(len(sent)).tolist())
    a = run(client(FedPAC, lam=0.0, head_rate=1.0), skewed(), rounds=3, local_epochs=3)
    b = run(client(FedRep, body_epochs=2), skewed(), rounds=3, local_epochs=3)
    assert_equal(learners(a), weights(b))


def test_statistics_equal_the_formula():
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(30, 4)), rng.integers(0, 3, 30)
    y[y == 1] = 0
    n = np.bincount(y, minlength=3)
    means = np.stack([h[y == c].mean(0) if n[c] else np.zeros(4) for c in range(3)])
    squares = np.array([(h[y == c] ** 2).sum(1).mean() if n[c] else 0 for c in range(3)])
    v, weighted = statistics(*map(torch.tensor, (means, squares, n)))
    p = n / 30
    expected = (sum(p[c] * squares[c] for c in range(3)) - sum(p[c] ** 2 * means[c] @ means[c] for c in range(3))) / 30
    assert float(v) == pytest.approx(expected)
    np.testing.assert_allclose(weighted, p[:, None] * means, rtol=1e-6)


def test_equal_means_weigh_heads_by_their_inverse_variances():
    v = torch.tensor([1.0, 2.0, 4.0])
    expected = (1 / v) / (1 / v).sum()
    torch.testing.assert_close(head_weights(v, torch.ones(3, 5, 4)), expected.double().expand(3, 3), atol=1e-6, rtol=0)


@pytest.mark.seconds
def test_heads_of_a_thousand_equal_clients_are_averaged(monkeypatch):
    """Of which no weight is above the smallest that counts."""
    equal = torch.full((1000,), 1e-3, dtype=torch.float64)
    monkeypatch.setattr("lit_pfl.methods.partial.fedpac.smallest_on_simplex", lambda vectors: equal)
    weights = head_weights(torch.ones(1000), torch.ones(1000, 1, 1))
    torch.testing.assert_close(weights, equal.expand(1000, 1000))


def test_without_variances_every_head_is_its_own():
    h = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head_weights(torch.zeros(4), h), torch.eye(4, dtype=torch.float64))


def test_the_minimum_on_the_simplex():
    """No other point of it is lower, and where entries are above zero the gradient is equal."""
    rng = np.random.default_rng(1)
    for vectors in rng.normal(size=(5, 6, 4)) + 0.5, 1e-9 * rng.normal(size=(5, 6, 4)), rng.normal(size=(5, 3, 7)):
        for one in vectors:
            a = smallest_on_simplex(torch.tensor(one)).numpy()
            assert (a >= 0).all()
            assert a.sum() == pytest.approx(1)
            gradient = one.T @ one @ a
            assert gradient[a > 0] - gradient.min() == pytest.approx(0, abs=1e-9 * np.square(one).sum())


def test_vectors_without_length_weigh_the_same():
    assert smallest_on_simplex(torch.zeros(3, 4)).tolist() == [0.25] * 4
    assert smallest_on_simplex(torch.ones(3, 1)).tolist() == [1]


def test_what_is_sent_and_what_comes_back():
    federation = run(client(FedPAC), skewed(), rounds=2, local_epochs=2)
    uploads = [member.upload() for member in federation.clients.values()]
    server = federation.coordinator.server
    rows = head_weights(torch.stack([u[VARIANCE] for u in uploads]), torch.stack([u[MEANS] for u in uploads])).numpy()
    assert (rows > 0).sum() > 3
    for k, row in enumerate(rows):
        expected = sum(a * u["backbone.head.weight"].double() for a, u in zip(row, uploads, strict=True))
        torch.testing.assert_close(server.reply(k)["backbone.head.weight"], expected.float(), atol=1e-6, rtol=0)
    n = [federation.data.client(k).num_samples for k in federation.clients]
    body = np.average([u["backbone.body.0.weight"].numpy() for u in uploads], axis=0, weights=n)
    np.testing.assert_allclose(server.reply(1)["backbone.body.0.weight"], body, atol=1e-6)
    for c in range(10):
        counts = [int(u[COUNTS][c]) for u in uploads]
        if any(counts):
            mean = np.average([u[PROTOTYPES][c].numpy() for u in uploads], axis=0, weights=counts)
            np.testing.assert_allclose(server.reply(0)[PROTOTYPES][c], mean, atol=1e-6)
    h, y = features(federation, 0), whole_data(federation, 0)[1].numpy()
    np.testing.assert_allclose(uploads[0][PROTOTYPES][y[0]], h[y == y[0]].mean(0), atol=1e-5)


def test_the_term_draws_the_body_towards_the_prototypes_only():
    member = run(client(FedPAC, lam=3.0), skewed(), rounds=2, local_epochs=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.begin_round()
    member.eval()
    plain = torch.nn.functional.cross_entropy(member.backbone(images), labels)
    member.begin_epoch(0, 2)
    assert torch.equal(member.objective((images, labels), 0), plain)
    member.begin_epoch(1, 2)
    h, own = member.backbone.body(images), member.class_means()[0]
    t = torch.stack([(member.common[PROTOTYPES] if member.common[COUNTS][c] else own)[c] for c in labels])
    torch.testing.assert_close(member.objective((images, labels), 0), plain + 3 * (h - t).square().mean())


def test_one_local_epoch_is_too_few():
    with pytest.raises(ConfigError, match="give at least 2 local epochs"):
        run(client(FedPAC), skewed(), rounds=1, local_epochs=1)
