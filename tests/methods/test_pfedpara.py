"""pFedPara: what is everybody's, what is a client's own, and how much of it there is."""

import numpy as np
import pytest
import torch

from lit_pfl.errors import ConfigError
from lit_pfl.methods import PFedPara
from lit_pfl.models import ResNet9
from lit_pfl.nn import hadamard_layers
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run, spec, weights

OWN = {f"backbone.body.0.w2.{factor}" for factor in "toi"}
COMMON = {f"backbone.body.0.w1.{factor}" for factor in "toi"} | {"backbone.body.0.bias"}
NORM = {"backbone.body.1.weight", "backbone.body.1.bias"}
STATISTICS = {f"backbone.body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
HEAD = {"backbone.head.weight", "backbone.head.bias"}


@pytest.mark.parametrize(
    ("options", "permuted", "expected"),
    [
        ({}, True, COMMON | NORM),
        ({}, False, COMMON | NORM | HEAD),
        ({"share_head": False}, False, COMMON | NORM),
        ({"norm_stats": "averaged"}, True, COMMON | NORM | STATISTICS),
        ({"personal": False}, True, COMMON | NORM | OWN),
        ({"personal": False}, False, COMMON | NORM | OWN | HEAD),
    ],
)
def test_what_travels(options, permuted, expected):
    federation = run(client(PFedPara, **options), digits(2, permute_labels=permuted), rounds=1)
    assert set(federation.clients[0].upload()) == set(federation.coordinator.server.reply(0)) == expected


def mean_of_uploads(federation) -> dict[str, np.ndarray]:
    """The mean weighted by numbers of samples, of what clients have after the last round's training."""
    sizes = [len(federation.data.client(k).train.dataset) for k in federation.clients]
    shared = [member.upload() for member in federation.clients.values()]
    return {
        name: sum(n * s[name].numpy().astype(np.float64) for n, s in zip(sizes, shared, strict=True)) / sum(sizes)
        for name in shared[0]
    }


@pytest.mark.parametrize("personal", [True, False])
def test_what_travels_is_averaged_and_the_rest_stays(personal):
    federation = run(client(PFedPara, personal=personal), digits(3, permute_labels=True), rounds=2)
    before = weights(federation)
    reply, mean = federation.coordinator.server.reply(1), mean_of_uploads(federation)
    for name in mean:
        np.testing.assert_allclose(reply[name].numpy(), mean[name], atol=1e-6)
    for member in federation.clients.values():
        member.download(reply)
    after = weights(federation)
    for name in before[0]:
        equal = torch.equal(after[0][name], after[1][name])
        assert equal if name in reply else torch.equal(after[0][name], before[0][name])
    for name in OWN:  # trained, each in its own way
        assert torch.equal(after[0][name], after[1][name]) is not personal
        assert not torch.equal(before[0][name], before[1][name])


def test_clients_start_from_the_same_private_factors_and_train_them():
    federation = run(client(PFedPara), digits(2), rounds=1)
    with federation.draws.default_generators("weights"):
        initial = federation.prototype.build(federation.clients[0].spec).learner.state_dict()
    with federation.draws.default_generators("weights"):
        assert_equal(federation.prototype.build(federation.clients[1].spec).learner.state_dict(), initial)
    for state in weights(federation).values():
        assert not any(torch.equal(state[name], initial[name]) for name in OWN | COMMON | HEAD)


def test_the_body_is_hadamard_and_the_classifier_dense():
    for personal in (True, False):
        member = client(PFedPara, personal=personal).build(spec(channels=1, image_size=8))
        assert [name for name, _ in hadamard_layers(member.learner)] == ["backbone.body.0"]
        [(_, layer)] = hadamard_layers(member.learner)
        w1, w2 = layer.w1(), layer.w2()
        torch.testing.assert_close(layer.weight, w1 * (w2 + 1) if personal else w1 * w2)
        assert type(member.backbone.head) is torch.nn.Linear


@pytest.mark.parametrize(
    ("ratio", "rounds", "gigabytes"),
    # Factorized-FL's Table 1 counts a common 99 rounds of 100, and half of that of 50
    [(0.72, 49.5, "7.40"), (0.78, 99, "15.98")],
)
def test_traffic_of_resnet9_is_that_of_the_papers_table(ratio, rounds, gigabytes):
    member = PFedPara(ratio=ratio, backbone=ResNet9, norm_stats="averaged").build(spec(labels_agree=False))
    elements = member.upload().elements
    assert elements == {0.72: 934_757, 0.78: 1_008_771}[ratio]  # 5,896 of them of the norm layers
    assert f"{4 * 20 * 2 * rounds * elements / 1e9:.2f}" == gigabytes
    factors = elements - 5_896
    assert sum(p.numel() for p in member.parameters()) == 2 * factors + 2_944 + 2_570
    assert abs(2 * factors / 2_565_824 - ratio) < 0.005


def test_gamma_of_the_paper_chooses_ranks_too():
    """0.81 is near the 7.4 GB too."""
    member = PFedPara(0.81, "gamma", backbone=ResNet9, norm_stats="averaged").build(spec(labels_agree=False))
    assert [layer.rank for _, layer in hadamard_layers(member.learner)] == [5, 50, 65, 65, 90, 128, 128, 128]
    assert f"{4 * 20 * 2 * 49.5 * member.upload().elements / 1e9:.3f}" == "7.400"


def test_errors():
    with pytest.raises(ConfigError, match=r"model\.factorization: PFedPara"):
        PFedPara(factorization=Factorization())
    with pytest.raises(ConfigError, match="ratio=2"):
        client(PFedPara, ratio=2.0, rank_rule="gamma").build(spec(channels=1, image_size=8))
