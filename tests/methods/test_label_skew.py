"""FedLC and FedRS against their formulas."""

import numpy as np
import pytest
import torch
from heads import skewed, softmax, whole_data
from quadratic import sgd, softmax_regression

from lit_pfl.data import Dirichlet
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedLC, FedRS
from lit_pfl.methods.global_model.fedlc import calibration
from tiny import client, digits, run


def test_calibration():
    expected = [-0.5 * 16**-0.25, -1e4, -0.5 * 81**-0.25]
    np.testing.assert_allclose(calibration(torch.tensor([16, 0, 81]), 0.5), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [(FedLC, {"tau": 1.0}), (FedRS, {"alpha": 0.3}), (FedRS, {"alpha": 0.3, "scale": "counts"})],
)
def test_updates_equal_the_formula(method, options):
    """Softmax regression on full batches, in NumPy: the features are the pixels."""
    data = digits(3, batch_size=2000, partition=Dirichlet(alpha=0.1))
    federation = run(softmax_regression(method, optimizer=sgd(0.1), **options), data, rounds=2, local_epochs=3)
    start = run(softmax_regression(method, optimizer=sgd(0.0)), data, rounds=1).clients[0].backbone.head
    w, b = start.weight.detach().double().numpy(), start.bias.detach().double().numpy()
    missing = 0
    for _ in range(2):
        local = []
        for k in federation.clients:
            images, labels = whole_data(federation, k)
            x, y = images.flatten(1).double().numpy(), np.eye(10)[labels.numpy()]
            n = y.sum(0)
            missing += (n == 0).sum()
            s, shift = np.ones(10), np.zeros(10)
            if method is FedLC:
                shift = -np.where(n > 0, np.maximum(n, 1) ** -0.25, np.inf)
            elif "scale" in options:
                s = 0.3 + 0.7 * n / n.max()
            else:
                s = np.where(n > 0, 1.0, 0.3)
            g, c = w, b
            for _ in range(3):
                by_logit = (softmax(x @ g.T * s + c + shift) - y) / len(x)
                g, c = g - 0.1 * (by_logit.T * s[:, None]) @ x, c - 0.1 * by_logit.sum(0)
            local.append((len(x), g, c))
        w, b = (np.average([part[i] for part in local], axis=0, weights=[part[0] for part in local]) for i in (1, 2))
    assert missing
    np.testing.assert_allclose(federation.coordinator.server.model["backbone.head.weight"], w, atol=1e-5)
    np.testing.assert_allclose(federation.coordinator.server.model["backbone.head.bias"], b, atol=1e-5)


def test_what_is_evaluated_is_not_calibrated():
    member = run(client(FedLC), skewed(), rounds=1).clients[0]
    images, _ = next(iter(member.data.val))
    member.eval()
    with member.personalized() as learner:
        assert torch.equal(learner(images), member.backbone(images))


def test_a_label_that_the_head_has_no_logit_for_is_named():
    with pytest.raises(ConfigError, match=r"model.head: the training data has a class label 9, and the head only 5"):
        run(client(FedLC, backbone=lambda channels, classes: _small()), digits(2))


def test_samples_without_a_class_are_named():
    data = digits(2)
    data.setup()
    data.data.labels[data.indices["train"][1][0]] = -100
    with pytest.raises(ConfigError, match=r"Client 1: FedLC .*: a training sample has the class label -100; "):
        run(client(FedLC), data)


def _small():
    from tiny import Parts

    return Parts(torch.nn.Flatten(), torch.nn.Linear(64, 5))
