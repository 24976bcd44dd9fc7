"""FedBN: what stays at home, and that nothing else is different from averaging."""

import pytest
import torch
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedBN
from tiny import Parts, client, digits, run, weights


def without_norm(channels, classes):
    return Parts(nn.Flatten(), nn.Linear(64, classes))


def with_group_norm(channels, classes):
    return Parts(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8)), nn.Linear(8, classes))


@pytest.mark.parametrize("statistics", ["local", "averaged"])
def test_batch_norm_differs_and_the_rest_agrees(statistics):
    federation = run(client(FedBN, norm_stats=statistics), digits(3), rounds=2)
    for k, member in federation.clients.items():
        member.download(federation.coordinator.server.reply(k))
    one, other = (weights(federation)[k] for k in (0, 1))
    assert [name for name in one if torch.equal(one[name], other[name])] == [
        "backbone.body.0.weight", "backbone.body.0.bias", "backbone.body.1.num_batches_tracked",
        "backbone.head.weight", "backbone.head.bias",
    ]  # fmt: skip


def test_a_network_without_batch_norm_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.learner: ImageClassifier has no batch norm, so FedBN would be Fed"):
        run(client(FedBN, backbone=without_norm), rounds=1)
    with pytest.raises(ConfigError, match=r"model\.of=all keeps other norms"):
        run(client(FedBN, backbone=with_group_norm), rounds=1)
    with pytest.raises(ConfigError, match=r"has no norm layer"):
        run(client(FedBN, of="all", backbone=without_norm), rounds=1)


def test_other_norms_stay_at_home_too_if_asked():
    federation = run(client(FedBN, of="all", backbone=with_group_norm), rounds=1)
    assert not any(".2." in name for name in federation.clients[0].upload())
