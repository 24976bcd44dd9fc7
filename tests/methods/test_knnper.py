"""kNN-Per against its formula."""

import numpy as np
import pytest
import torch
from heads import features, skewed, softmax, whole_data

from lit_pfl.errors import ConfigError
from lit_pfl.methods import KNNPer
from tiny import client, run


def predicted(member, images):
    member.eval()
    with torch.no_grad(), member.personalized() as learner:
        return learner(images).double().numpy()


@pytest.mark.parametrize(("k", "lam", "scale"), [(3, 0.5, 1.0), (10, 0.9, 0.1), (10_000, 1.0, 2.0)])
def test_predictions_equal_the_formula(k, lam, scale):
    federation = run(client(KNNPer, k=k, lam=lam, scale=scale), skewed(), rounds=2)
    member = federation.clients[0]
    images, _ = next(iter(member.data.val))
    stored, labels = features(federation, 0), whole_data(federation, 0)[1].numpy()
    with torch.no_grad():
        h = member.backbone.body(images).double().numpy()
        z = member.backbone(images).double().numpy()
    distances = ((h[:, None] - stored) ** 2).sum(2)
    shares = np.zeros((len(h), 10))
    for i, row in enumerate(distances):
        for j in row.argsort()[:k]:
            shares[i, labels[j]] += np.exp(-row[j] / (h.shape[1] * scale))
    shares /= shares.sum(1, keepdims=True)
    expected = lam * shares + (1 - lam) * softmax(z)
    np.testing.assert_allclose(np.exp(predicted(member, images)), expected, atol=1e-5)


def test_the_only_neighbour_of_a_training_sample_is_itself():
    federation = run(client(KNNPer, k=1, lam=1.0), skewed(), rounds=1)
    images, labels = whole_data(federation, 0)
    assert (predicted(federation.clients[0], images).argmax(1) == labels.numpy()).all()


def test_all_samples_at_a_wide_scale_are_the_shares_of_classes():
    federation = run(client(KNNPer, k=10_000, lam=1.0, scale=1e9), skewed(), rounds=1)
    images, labels = whole_data(federation, 0)
    shares = np.bincount(labels, minlength=10) / len(labels)
    np.testing.assert_allclose(np.exp(predicted(federation.clients[0], images[:3])), np.tile(shares, (3, 1)), atol=1e-6)


def test_the_weight_is_chosen_on_validation_data():
    member = run(client(KNNPer), skewed(), rounds=1).clients[0]
    chosen, neighbours = member._best_weight(member._neighbours()), member._neighbours()

    def right(weight):
        member.lam = weight
        images, labels = (torch.cat(parts) for parts in zip(*member.data.val, strict=True))
        return (predicted(member, images).argmax(1) == labels.numpy()).sum()

    scores = [right(i / 10) for i in range(11)]
    assert scores[round(chosen * 10)] == max(scores)
    member.data = None
    assert member._best_weight(neighbours) == 0.5


def test_a_part_of_the_data_is_always_the_same():
    member = run(client(KNNPer, capacity=0.25), skewed(), rounds=1).clients[0]
    n = member.data.num_samples
    first, again = member._neighbours(), member._neighbours()
    assert len(first.features) == round(n / 4)
    assert torch.equal(first.features, again.features)
    member.capacity = 7
    assert len(member._neighbours().features) == 7


def test_a_weight_above_one_is_refused():
    with pytest.raises(ConfigError, match=r"model.lam=2"):
        KNNPer(lam=2.0)
