"""CCVR against its formulas."""

import copy

import numpy as np
import pytest
import torch
from heads import features, learners, skewed, whole_data

from lit_pfl.errors import ConfigError
from lit_pfl.methods import CCVR, FedAvg
from lit_pfl.methods.global_model.ccvr import COUNTS, COVARIANCES, MEANS, class_statistics, global_statistics, virtual
from lit_pfl.testing import assert_equal
from tiny import client, run, weights

HEAD = "backbone.head.weight"


def test_clients_are_those_of_fedavg():
    a, b = (run(client(method), skewed(), rounds=3) for method in (CCVR, FedAvg))
    assert_equal(learners(a), weights(b))
    assert_equal(dict(a.coordinator.server.model), dict(b.coordinator.server.model))


def test_statistics_of_all_clients_are_those_of_all_samples():
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(40, 3)) + 5, rng.integers(0, 3, 40)
    y[y == 1] = 0
    y[0] = 1  # a class with one sample
    parts = np.array_split(np.arange(40), 4)
    sent = [class_statistics(torch.tensor(h[p]), torch.tensor(y[p]), 4) for p in parts]
    counts, means, covariances = global_statistics(*(torch.stack(x) for x in zip(*sent, strict=True)))
    np.testing.assert_array_equal(counts, np.bincount(y, minlength=4))
    for c in (0, 2):
        np.testing.assert_allclose(means[c], h[y == c].mean(0), rtol=1e-10)
        np.testing.assert_allclose(covariances[c], np.cov(h[y == c].T), rtol=1e-8)
        # and as the paper has it
        n = np.array([(y[p] == c).sum() for p in parts])
        first = sum(max(0, k - 1) * s[2][c].numpy() for k, s in zip(n, sent, strict=True))
        second = sum(k * np.outer(s[1][c], s[1][c]) for k, s in zip(n, sent, strict=True))
        paper = (first + second - n.sum() * np.outer(means[c], means[c])) / (n.sum() - 1)
        np.testing.assert_allclose(covariances[c], paper, atol=1e-9)
    np.testing.assert_array_equal(means[3], 0)


def test_virtual_features_have_the_mean_and_the_covariance():
    torch.manual_seed(0)
    a = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    drawn = virtual(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), a @ a.T, 100_000).numpy()
    np.testing.assert_allclose(drawn.mean(0), [1, 2, 3], atol=0.03)
    np.testing.assert_allclose(np.cov(drawn.T), a @ a.T, atol=0.06)
    assert np.ptp(drawn[:, 2]) < 1e-6


def test_a_client_sends_the_statistics_under_the_received_body():
    federation = run(client(CCVR), skewed(), rounds=1)
    member = federation.clients[1]
    member.download(federation.coordinator.server.reply(1))
    member.begin_round()
    h, y = features(federation, 1), whole_data(federation, 1)[1].numpy()
    sent = member.upload()
    np.testing.assert_array_equal(sent[COUNTS], np.bincount(y, minlength=10))
    c = np.bincount(y).argmax()
    np.testing.assert_allclose(sent[MEANS][c], h[y == c].mean(0), atol=1e-5)
    np.testing.assert_allclose(sent[COVARIANCES][c], np.cov(h[y == c].T), atol=1e-4)


@pytest.mark.seconds
def test_the_head_is_calibrated_and_the_body_is_what_the_round_began_with():
    shorter, longer = (run(client(CCVR, epochs=20, lr=0.1), skewed(), rounds=r) for r in (2, 3))
    server, before = longer.coordinator.server, shorter.coordinator.server.model
    for name, tensor in server.evaluation_reply(0).items():
        assert torch.equal(tensor, before[name]) == (".head." not in name)
    assert_equal(dict(server.global_model()), dict(server.evaluation_reply(2)))
    assert_equal(dict(server.reply(0)), dict(server.model))

    uploads = [member.upload() for member in longer.clients.values()]
    stacked = (torch.stack([upload[name] for upload in uploads]) for name in (COUNTS, MEANS, COVARIANCES))
    counts, means, covariances = global_statistics(*stacked)
    there = (counts > 1).nonzero()[:, 0]
    drawn = torch.cat([virtual(means[c], covariances[c], 200) for c in there])

    def loss(model):
        z = drawn @ model[HEAD].T + model["backbone.head.bias"]
        return float(torch.nn.functional.cross_entropy(z, there.repeat_interleave(200)))

    assert loss(server.calibrated) < 0.8 * loss(before)


@pytest.mark.seconds
def test_those_who_are_not_in_the_round_count_with_what_they_sent_last():
    federation = run(client(CCVR), skewed(), rounds=8, participation=1)
    server = federation.coordinator.server
    assert sorted(server.statistics) == [0, 1, 2]
    for id, own in server.statistics.items():
        np.testing.assert_array_equal(own[COUNTS], np.bincount(whole_data(federation, id)[1].numpy(), minlength=10))
    again = copy.deepcopy(server)
    again.statistics = {}
    again.load_state_dict(server.state_dict())
    assert_equal(dict(again.statistics[1]), dict(server.statistics[1]))


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match=r"^model\.share_head: CCVR calibrates the common head, and .* is not shared"):
        run(client(CCVR, share_head=False), skewed(), rounds=1)


def test_more_virtual_features_than_fit_into_memory_are_refused_before_any_training():
    with pytest.raises(ConfigError, match=r"model.samples_per_class=1000000000000: there is not enough memory"):
        run(client(CCVR, samples_per_class=10**12), skewed(), rounds=1)
