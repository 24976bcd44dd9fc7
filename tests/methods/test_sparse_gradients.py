"""Learners whose embedding has sparse gradients."""

import lightning as L
import pytest
import torch
from torch import nn

import lit_pfl.methods as methods
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from tiny import Learner, run, weights

NAMES = ["PFedMe", "ElasticAggregation"]


def data(client):
    draw = torch.Generator().manual_seed(client)
    words = torch.randint(10, (20, 4), generator=draw)
    return L.LightningDataModule.from_datasets(
        torch.utils.data.TensorDataset(words, words[:, 0] % 2), batch_size=5, num_workers=0
    )


def fit(name, sparse):
    torch.manual_seed(0)
    learner = Learner(nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Flatten()), nn.Linear(12, 2))
    federation = run(getattr(methods, name)(learner=learner), PerClient([data(k) for k in range(3)]), seed=0)
    assert not federation.coordinator.refused
    return weights(federation)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_with_dense_ones(name):
    torch.testing.assert_close(fit(name, True), fit(name, False))


def test_where_it_cannot_it_is_refused_in_a_line():
    with pytest.raises(ConfigError, match="^model.learner: APPLE needs gradients that are dense; give"):
        fit("APPLE", True)
    assert fit("APPLE", False)
