"""FD and FedNTD against their formulas."""

import numpy as np
import pytest
import torch
from heads import skewed, softmax, whole_data

from lit_pfl.methods import FD, FedNTD
from lit_pfl.methods.global_model.fedntd import without_true
from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, client, run


@pytest.mark.parametrize("averages", ["probabilities", "logits"])
def test_mean_predictions_equal_the_formula(averages):
    federation = run(client(FD, averages=averages), skewed(), rounds=2)
    own, counts = np.zeros((3, 10, 10)), np.zeros((3, 10), int)
    for k, member in federation.clients.items():
        images, labels = whole_data(federation, k)
        with torch.no_grad():
            z = member.backbone.eval()(images).double().numpy()
        z = softmax(z) if averages == "probabilities" else z
        for c in set(labels.tolist()):
            own[k, c], counts[k, c] = z[labels.numpy() == c].mean(0), (labels == c).sum()
        np.testing.assert_allclose(member.upload()[PROTOTYPES], own[k], atol=1e-5)
    model = federation.coordinator.server.model
    for c in range(10):
        if counts[:, c].any():
            np.testing.assert_allclose(model[PROTOTYPES][c], own[counts[:, c] > 0, c].mean(0), atol=1e-5)


@pytest.mark.parametrize("averages", ["probabilities", "logits"])
def test_the_term_is_the_cross_entropy_of_the_mean_predictions(averages):
    member = run(client(FD, lam=2.0, averages=averages), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    member.common[COUNTS][labels[0]] = 0
    with torch.no_grad():
        z = member.backbone(images).double().numpy()
    y = labels.numpy()
    g, known = member.common[PROTOTYPES].double().numpy(), member.common[COUNTS].numpy() > 0
    g = softmax(g) if averages == "logits" else g
    log_p = np.log(softmax(z))
    expected = (-log_p[range(len(y)), y]).mean() + 2 * (-(g[y] * log_p).sum(1) * known[y]).mean()
    np.testing.assert_allclose(member.objective((images, labels), 0).detach(), expected, rtol=1e-4)


def test_logits_without_the_true_class():
    z = torch.arange(12.0).view(3, 4)
    assert_equal(without_true(z, torch.tensor([0, 3, 1])), torch.tensor([[1.0, 2, 3], [4, 5, 6], [8, 10, 11]]))


def test_fedntd_s_objective_equals_the_formula():
    member = run(client(FedNTD, beta=0.7, tau=2.0), skewed(), rounds=1).clients[0]
    images, labels = next(iter(member.data.train))
    member.begin_round()
    member.eval()
    teacher = member.backbone(images).detach().double().numpy()
    with torch.no_grad():
        for weight in member.learner.parameters():
            weight += 0.1
        z = member.backbone(images).double().numpy()
    y = labels.numpy()
    rest = np.arange(10) != y[:, None]
    q_t, q = (softmax(logits[rest].reshape(-1, 9) / 2) for logits in (teacher, z))
    loss = -np.log(softmax(z))[range(len(y)), y].mean()
    expected = loss + 0.7 * 4 * (q_t * np.log(q_t / q)).sum(1).mean()
    np.testing.assert_allclose(member.objective((images, labels), 0).detach(), expected, rtol=1e-4)
    member.release_round_state()
    assert not member.received
    assert tensors_of(member.learner)
