"""Elastic aggregation against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed
from torch import nn
from two_layers import ALL, TwoLayers, arrays, backward, logits

from lit_pfl.core import Payload
from lit_pfl.core.robust import Krum
from lit_pfl.errors import ConfigError
from lit_pfl.methods import ElasticAggregation, FedAvg, Scaffold
from lit_pfl.methods.global_model.elastic_aggregation import SENSITIVITY, ElasticServer, elastic_factors
from tiny import Parts, assert_equal, client, digits, run, weights


def federation(rounds: int, **options):
    return run(client(ElasticAggregation, backbone=TwoLayers, **options), skewed(), rounds=rounds)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_round_equals_the_formula(share):
    before, after = (federation(rounds, share=share, mu=0.8) for rounds in (1, 2))
    received = before.clients[0]
    received.download(before.coordinator.server.model)
    w = arrays(received.backbone)
    uploads = {k: {n: t.double().numpy() for n, t in c.upload().items()} for k, c in after.clients.items()}
    for k, member in after.clients.items():
        o = {name: np.zeros_like(value) for name, value in w.items()}
        seen = 0
        for images, _ in member.unlabeled():
            x = images.flatten(1).double().numpy()
            seen += len(x)
            g = backward(w, x, 2 * logits(w, x) / len(x))
            o = {name: 0.8 * o[name] + 0.2 * np.abs(g[name]) for name in ALL}
        assert seen == int(share * after.data.client(k).num_samples)
        for name in ALL:
            np.testing.assert_allclose(uploads[k][f"{SENSITIVITY}backbone.{name}"], o[name], rtol=1e-3, atol=1e-5)
    n = np.array([after.data.client(k).num_samples for k in after.clients])

    def mean(name: str) -> np.ndarray:
        return np.average([upload[name] for upload in uploads.values()], axis=0, weights=n)

    largest = max(mean(f"{SENSITIVITY}backbone.{name}").max() for name in ALL)
    for name in ALL:
        zeta = 1.5 - mean(f"{SENSITIVITY}backbone.{name}") / largest
        expected = w[name] + zeta * (mean(f"backbone.{name}") - w[name])
        np.testing.assert_allclose(after.coordinator.server.model[f"backbone.{name}"], expected, atol=1e-6)


def test_the_smallest_share_is_one_sample():
    [(images, _)] = federation(1, share=1e-3).clients[0].unlabeled()
    assert len(images) == 1


def test_factors_lie_between_tau_and_one_more():
    o = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[4.0]])}
    found = elastic_factors(o, 0.5)
    assert_equal(found, {"a": torch.tensor([1.5, 1.25]), "b": torch.tensor([[0.5]])})
    assert_equal(elastic_factors({"a": torch.zeros(2)}, 0.5), {"a": torch.ones(2)})


def test_the_most_sensitive_weights_stay_where_they_are_without_tau():
    server = ElasticServer(frozenset({"w"}), 0.0)
    server.model = {"w": torch.tensor([1.0, 1.0])}
    upload = {"w": torch.tensor([3.0, 3.0]), f"{SENSITIVITY}w": torch.tensor([2.0, 1.0])}
    server.num_samples = {0: 5}
    server.aggregate(1, {0: Payload(upload)})
    assert_equal(dict(server.model), {"w": torch.tensor([1.0, 2.0])})


@pytest.mark.seconds
def test_with_equal_sensitivities_and_tau_1_it_is_fedavg_bit_for_bit(monkeypatch):
    class Equal(ElasticAggregation):
        def upload(self):
            sent = super().upload()
            return sent.with_({name: torch.full_like(sent[name], 0.1) for name in sent if SENSITIVITY in name})

    ours, theirs = (run(client(kind, **more), skewed(), rounds=3) for kind, more in
                    ((Equal, {"tau": 1.0}), (FedAvg, {})))  # fmt: skip
    for k, state in weights(theirs).items():
        assert_equal({name: weights(ours)[k][name] for name in state}, state)
    plain = run(client(ElasticAggregation, tau=1.0), skewed(), rounds=3)
    assert not torch.equal(weights(plain)[0]["backbone.head.weight"], weights(theirs)[0]["backbone.head.weight"])


def test_no_output_depends_on_a_weight_that_a_module_has_frozen_since():
    member = federation(1).clients[0]
    member.backbone.head.weight.requires_grad_(False)
    member.begin_round()
    assert {name for name, own in member.sensitivity.items() if not own.any()} == {"backbone.head.weight"}


def test_a_network_without_a_head_module_is_refused():
    with pytest.raises(ConfigError, match=r"model\.head: ElasticAggregation has to know which parameters"):
        run(
            client(ElasticAggregation, backbone=lambda channels, classes: Parts(nn.Linear(8, classes), nn.Flatten())),
            rounds=1,
        )


@pytest.mark.parametrize("method", [ElasticAggregation, Scaffold])
def test_a_robust_mean_sees_whole_uploads(method):
    """A mean that takes one client's upload takes all of it, what is beside the weights too."""
    asked = []

    class Noted(Krum):
        def __call__(self, uploads, weights, names, center):
            asked.append(set(names))
            return super().__call__(uploads, weights, names, center)

    optimizer = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05)}
    run(client(method, mean=Noted(1), **optimizer), digits(5), rounds=2)
    assert len(asked) == 2
    assert len({len(names) for names in asked}) == 1
    assert any("." in name and name.split(".")[0] in ("sensitivity", "control") for name in asked[0])
