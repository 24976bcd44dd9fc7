"""Label permutations against the paper's table."""

import random
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_pfl.data import CIFAR10, Digits, Domains, FromDataset, Table, label_permutation

# Factorized-FL, Table 2: the new label of each of the 10 classes, at clients 0 to 19.
TABLE_2 = [
    [2, 8, 3, 5, 6, 4, 9, 0, 1, 7],
    [5, 4, 0, 9, 2, 1, 3, 7, 8, 6],
    [3, 1, 5, 0, 6, 4, 2, 9, 7, 8],
    [0, 5, 3, 7, 9, 8, 1, 4, 6, 2],
    [8, 1, 4, 9, 6, 5, 2, 3, 7, 0],
    [2, 8, 9, 3, 5, 6, 0, 7, 4, 1],
    [4, 1, 9, 8, 2, 6, 3, 0, 5, 7],
    [4, 0, 5, 8, 1, 6, 2, 3, 7, 9],
    [2, 9, 4, 7, 0, 3, 6, 5, 8, 1],
    [2, 7, 1, 6, 9, 4, 3, 0, 5, 8],
    [0, 7, 5, 2, 6, 9, 3, 1, 8, 4],
    [6, 3, 5, 7, 1, 4, 0, 2, 9, 8],
    [1, 6, 3, 8, 7, 4, 5, 9, 0, 2],
    [8, 2, 0, 7, 3, 4, 6, 5, 9, 1],
    [4, 0, 1, 6, 7, 5, 2, 3, 8, 9],
    [0, 4, 6, 7, 5, 9, 1, 2, 3, 8],
    [0, 1, 3, 4, 5, 8, 7, 9, 6, 2],
    [6, 8, 7, 4, 3, 1, 2, 5, 0, 9],
    [9, 1, 6, 3, 8, 2, 5, 0, 7, 4],
    [7, 4, 5, 8, 9, 0, 1, 6, 2, 3],
]


@pytest.mark.parametrize(("client", "column"), list(enumerate(TABLE_2)))
def test_seed_1234_gives_the_permutations_of_the_paper(client, column):
    assert label_permutation(client, 10) == column
    assert label_permutation(client, 10, seed=1234) == column


def test_the_table_was_copied_with_its_20_different_permutations():
    assert len(TABLE_2) == len({tuple(column) for column in TABLE_2}) == 20


@pytest.mark.parametrize("num_classes", [1, 2, 10, 100])
@pytest.mark.parametrize("seed", [0, 1234])
def test_every_class_gets_one_new_label(num_classes, seed):
    for client in range(10):
        assert sorted(label_permutation(client, num_classes, seed)) == list(range(num_classes))


def test_clients_and_seeds_differ_and_repeat():
    drawn = {(client, seed): label_permutation(client, 100, seed) for client in range(20) for seed in (0, 100, 1234)}
    assert len({tuple(labels) for labels in drawn.values()}) == len(drawn)
    assert all(label_permutation(client, 100, seed) == labels for (client, seed), labels in drawn.items())


def test_the_generators_of_the_process_are_left_alone():
    before = random.getstate()
    label_permutation(3, 10)
    assert random.getstate() == before


class Sample(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_of_any_whole_numbers_in_samples_with_names(dtype, in_memory):
    classes = [i % 4 for i in range(40)]
    samples = [Sample(torch.tensor([float(c)]), torch.tensor(c, dtype=dtype)) for c in classes]
    data = FromDataset(samples, num_clients=2, labels=classes, permute_labels=True, batch_size=4, in_memory=in_memory)
    data.setup()
    for batch in data.client(1).train:
        expected = [label_permutation(1, 4)[int(c)] for c in batch.image]
        assert batch.label.tolist() == expected


def names(data, client=1):
    data.setup()
    return data.label_names(client)


def test_labels_are_called_what_their_classes_are():
    """In a client's own order, and only those of its domain."""
    assert names(Digits(num_clients=2)) == [str(c) for c in range(10)]
    own = names(Digits(num_clients=2, permute_labels=True))
    assert [own[label] for label in TABLE_2[1]] == [str(c) for c in range(10)]
    for permuted in (False, True):
        data = Digits(num_clients=2, partition=Domains([[4, 2, 0, 8, 6], [1, 3, 5, 7, 9]]), permute_labels=permuted)
        own = names(data)
        assert len(own) == 5
        order = label_permutation(1, 5) if permuted else range(5)
        assert [own[label] for label in order] == [str(c) for c in data.domains[1]]
    assert names(Table("iris", num_clients=2)) == ["setosa", "versicolor", "virginica"]
    assert names(Table("diabetes", num_clients=2)) is None


def test_names_of_a_dataset_of_ones_own_and_of_torchvisions(real_data):
    kinds = ["cat", "ape", "dog", "ape"] * 25
    own = TensorDataset(torch.arange(100).float(), torch.zeros(100))
    assert names(FromDataset(own, num_clients=2, labels=kinds)) == ["ape", "cat", "dog"]
    assert names(CIFAR10(root=str(real_data), verify=False, num_clients=2))[:2] == ["airplane", "automobile"]
