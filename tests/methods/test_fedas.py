"""FedAS against its formulas."""

import numpy as np
import pytest
import torch
from heads import learners, skewed, whole_data
from torch import nn
from two_layers import ALL, BODY, Arrays, TwoLayers, arrays, gradient

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server, UniformServer
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAS, FedPer
from lit_pfl.methods.partial.fedas import FISHER, FedASServer, distance_to_means
from tiny import Parts, assert_equal, client, run, weights


def hidden(w: Arrays, images: np.ndarray) -> np.ndarray:
    return np.tanh(images @ w["body.1.weight"].T + w["body.1.bias"])


def aligned(own: Arrays, received: Arrays, images: np.ndarray, labels: np.ndarray, lr: float, size: int) -> Arrays:
    """Return the received body after one pass towards the class means of the own one's features."""
    means = {c: hidden(own, images)[labels == c].mean(0) for c in np.unique(labels)}
    w = {name: received[name].copy() for name in BODY}
    for start in range(0, len(labels), size):
        x, y = images[start : start + size], labels[start : start + size]
        h = hidden(w, x)
        by_hidden = np.zeros_like(h)
        for c in np.unique(y):
            by_hidden[y == c] = 2 * (h[y == c] - means[c]) / (y == c).sum() / h.shape[1]
        below = by_hidden * (1 - h**2)
        w["body.1.weight"] -= lr * below.T @ x
        w["body.1.bias"] -= lr * below.sum(0)
    return w


def member_and_data(**options):
    federation = run(client(FedAS, backbone=TwoLayers, **options), skewed(), rounds=2)
    images, labels = whole_data(federation, 0)
    return federation, federation.clients[0], images.flatten(1).double().numpy(), labels.numpy()


@pytest.mark.parametrize("epochs", [1, 2])
def test_alignment_equals_the_formula(epochs):
    federation, member, images, labels = member_and_data(align_lr=0.5, align_batch_size=16, align_epochs=epochs)
    own, reply = arrays(member.backbone), federation.coordinator.server.reply(0)
    expected = {name: reply[f"backbone.{name}"].double().numpy() for name in BODY}
    for _ in range(epochs):
        expected = aligned(own, expected, images, labels, 0.5, 16)
    member.download(reply)
    found = arrays(member.backbone)
    for name in BODY:
        assert np.abs(found[name] - reply[f"backbone.{name}"].numpy()).max() > 1e-3
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)
    assert_equal({n: torch.tensor(found[n]) for n in ALL[2:]}, {n: torch.tensor(own[n]) for n in ALL[2:]})


def test_the_first_body_is_aligned_to_its_own_features():
    federation, member, images, labels = member_and_data(align_lr=0.5)
    reply = federation.coordinator.server.reply(0)
    received = {name: reply[f"backbone.{name}"].double().numpy() for name in BODY}
    member.trained.fill_(False)
    member.download(reply)
    expected = aligned(received, received, images, labels, 0.5, 16)
    for name in BODY:
        np.testing.assert_allclose(arrays(member.backbone)[name], expected[name], atol=1e-6)


def test_fisher_and_the_mean_by_it_equal_the_formulas():
    federation, member, images, labels = member_and_data()
    size = skewed().batch_size
    sums = sum(
        float((g**2).sum())
        for start in range(0, len(labels), size)
        for g in gradient(
            arrays(member.backbone), (images[start : start + size], labels[start : start + size])
        ).values()
    )
    uploads = [one.upload() for one in federation.clients.values()]
    assert float(uploads[0][FISHER]) == pytest.approx(sums, rel=1e-4)
    shares = np.array([float(upload[FISHER]) for upload in uploads])
    assert len(set(shares)) > 1
    expected = np.average([u["backbone.body.1.weight"].numpy() for u in uploads], axis=0, weights=shares)
    reply = federation.coordinator.server.reply(1)
    np.testing.assert_allclose(reply["backbone.body.1.weight"], expected, atol=1e-6)
    assert not [name for name in (*reply, *uploads[0]) if "head" in name]


def test_a_negative_sum_of_squares_counts_as_none():
    uploads = {k: Payload({"w": torch.full((2,), float(k)), FISHER: torch.tensor(f)}) for k, f in enumerate((1, 3, -4))}
    server = FedASServer()
    assert server.averaging_weights(1, uploads) == [0.25, 0.75, 0]
    assert server.averaging_weights(1, {2: uploads[2]}) == [1]


def test_a_distance_of_a_single_class_is_the_mean_squared_error():
    h, means = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.eye(3)
    found = distance_to_means(h, torch.full((5,), 1), means)
    torch.testing.assert_close(found, nn.functional.mse_loss(h, means[1].expand(5, 3)))


@pytest.mark.seconds
def test_without_alignment_and_with_equal_weights_it_is_fedper(monkeypatch):
    monkeypatch.setattr(FedASServer, "averaging_weights", Server.averaging_weights)
    monkeypatch.setattr(FedASServer, "weighting", "uniform")
    monkeypatch.setattr(FedPer, "configure_server", lambda self: UniformServer())
    ours, theirs = (run(client(kind, **more), skewed(), rounds=3, local_epochs=2) for kind, more in
                    ((FedAS, {"align_lr": 0.0}), (FedPer, {})))  # fmt: skip
    assert_equal(learners(ours), weights(theirs))


def test_a_network_without_a_head_module_is_refused():
    with pytest.raises(ConfigError, match=r"model\.head: FedAS has to know which parameters"):
        run(client(FedAS, backbone=lambda channels, classes: Parts(nn.Linear(8, classes), nn.Flatten())), rounds=1)
