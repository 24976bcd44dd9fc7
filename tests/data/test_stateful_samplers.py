"""Samplers that go on where they ended last."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from lit_pfl.data.loaders import num_samples
from lit_pfl.data.torch_loaders import kind_of


class Continuing(Sampler):
    def __init__(self, n):
        self.n, self.position = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            self.position += 1
            yield self.position % self.n


@pytest.mark.parametrize("batches", [False, True], ids=["samples", "batches"])
def test_a_look_does_not_move_them_on(batches):
    data, sampler = TensorDataset(torch.arange(6)), Continuing(6)
    given = {"batch_sampler": BatchSampler(sampler, 2, False)} if batches else {"batch_size": 2, "sampler": sampler}
    loader = DataLoader(data, **given)
    kind_of(loader)
    assert num_samples(loader) == 6
    assert sampler.position == 0


def test_samplers_of_any_kind_can_be_looked_at():
    class Fixed(list):
        @property
        def sampler(self):
            return range(6)

    for given in ({"batch_sampler": Fixed([[0, 1], [2]])}, {"sampler": (i for i in range(6))}):
        assert kind_of(DataLoader(TensorDataset(torch.arange(6)), **given)) is not None
