"""Loaders of clients that share a dataset, each with a sampler of its own, and loaders that draw while they collate."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lit_pfl.data.loaders import identity_of, in_order, labels_of, num_samples, samples_of
from lit_pfl_callbacks.tensors import bytes_of

OWN = [3, 5, 8]
SHARED = TensorDataset(torch.arange(12.0), torch.arange(12))


class Some(Sampler):
    """Those of some numbers, shuffled."""

    def __init__(self, numbers, epoch_size=None):
        self.numbers, self.size = numbers, epoch_size or len(numbers)

    def __iter__(self):
        return iter([self.numbers[i] for i in torch.randperm(len(self.numbers))[: self.size]])

    def __len__(self):
        return self.size


class Endless(Some):
    def __iter__(self):
        while True:
            yield from self.numbers


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"sampler": SubsetRandomSampler(OWN)}, OWN),
        ({"sampler": Some(OWN)}, OWN),
        ({"sampler": OWN}, OWN),
        ({"sampler": Endless(OWN)}, OWN),
        ({"sampler": range(2, 6)}, range(2, 6)),
        ({"sampler": RandomSampler(range(5))}, range(5)),
        ({"sampler": SequentialSampler(range(5))}, range(5)),
        ({"sampler": WeightedRandomSampler([0.0, 1.0, 2.0, 0.0], 12)}, [1, 2]),
        ({"sampler": DistributedSampler(SHARED, 3, 1, shuffle=False)}, [1, 4, 7, 10]),
        ({"batch_sampler": [[3, 5], [8]]}, OWN),
        ({"sampler": DistributedSampler(SHARED, 3, 1, shuffle=True)}, range(12)),  # others in every epoch
        ({"sampler": Some(list(range(12)), epoch_size=4)}, range(12)),
        ({"sampler": Some(list(range(12)))}, range(12)),
    ],
)
def test_a_client_has_the_samples_that_its_sampler_chooses_from(given, own):
    loader = DataLoader(SHARED, **given)
    assert num_samples(loader) == len(own)
    assert labels_of(loader).tolist() == list(own)
    assert samples_of(loader).tolist() == list(own)


def test_an_iterator_as_a_sampler_is_not_used_up():
    loader = DataLoader(SHARED, sampler=iter(OWN))
    assert num_samples(loader) == 12
    assert len([*loader]) >= 2  # one may have been looked at


def test_bytes_of_a_number_that_was_expanded():
    assert bytes(bytes_of(torch.tensor(7, dtype=torch.uint8).expand(1))) == b"\x07"  # as of a batch of one graph


def noisy(samples):
    x, y = default_collate(samples)
    return x + torch.randn(()) + np.random.randn(), y  # noqa: NPY002


@pytest.mark.parametrize("batch_size", [4, None], ids=["samples", "ready batches"])
def test_what_a_collate_fn_draws_is_the_same_whenever_samples_are_read_in_order(batch_size):
    collate = noisy if batch_size else lambda batch: (batch[0] + torch.randn(()), batch[1])
    loader = DataLoader(SHARED, batch_size, collate_fn=collate)
    assert bytes(identity_of(loader)) == bytes(identity_of(loader))
    before = torch.get_rng_state()
    first, second = [*in_order(loader)], [*in_order(loader)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][0], next(iter(loader))[0])  # training draws on
