"""How many samples a batch has, and how it is divided, whatever it is held in."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lit_pfl.data.batches import labels_in, tensors_in
from lit_pfl.errors import ConfigError
from lit_pfl.learners import size_of, split_batch

N = 8
X, Y = torch.arange(N * 10.0).view(N, 10), torch.arange(N)
NAMES = [f"sample {i}" for i in range(N)]


@dataclass
class Held:
    x: Any
    y: Any


class Graph:
    """As PyTorch Geometric has them: no mapping, but it goes to a device, and makes a dict of itself."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def to(self, device: Any) -> "Graph":
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Named(NamedTuple):
    x: Any
    y: Any


BATCHES = {
    "tensor": X,
    "pair": (X, Y),
    "default_collate": [X, Y],
    "mapping": {"names": NAMES, "x": X},
    "names first": (NAMES, X, Y),
    "nothing first": (None, X, Y),
    "empty first": ([], X),
    "dataclass": Held(X, Y),
    "named tuple": Named(X, Y),
    "deep": {"inputs": {"text": [NAMES, X]}},
    "two inputs": ((X, X), Y),
    "two of both": ([X, X], [Y, Y]),
    "views, and nothing else": [X, X + 1],
    "views of other sizes": ([torch.rand(N, 3, 6, 6), torch.rand(N, 3, 4, 4)], Y),
    "with a number": {"x": X, "temperature": torch.tensor(0.5)},
}
RAGGED = {
    "with weights of classes": ((X, torch.rand(3, 3)), "8 and 3 rows"),
    "with the edges of a graph": ([X, torch.zeros(2, 40, dtype=torch.int64)], "8 and 2 rows"),
    "two loaders": ([[X, Y], [X[:5], Y[:5]]], "8 and 5 rows"),
    "atoms of molecules": ({"x": X.repeat(3, 1), "batch": Y.repeat(3), "y": Y}, "24 and 8 rows"),
    "sequences": ((pack_sequence([X, X[:4]]), Y), "a PackedSequence"),
    "a graph": (Graph(x=X), "a Graph"),
    "an object": (SimpleNamespace(x=X), "a SimpleNamespace"),
    "an array": ((X, Y.numpy()), "a ndarray"),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_samples_are_counted_and_divided_wherever_they_are(batch):
    assert size_of(batch) == N
    assert [size_of(part) for part in split_batch(batch, 2)] == [4, 4]
    assert [size_of(part) for part in split_batch(batch, 3)] == [3, 3, 2]


@pytest.mark.parametrize(("batch", "words"), RAGGED.values(), ids=RAGGED.keys())
def test_what_has_no_row_for_each_sample_is_not_divided(batch, words):
    with pytest.raises(ConfigError, match=f"^A batch has .*{words}.* one row a sample") as error:
        split_batch(batch, 2)
    assert "\n" not in str(error.value)


def test_a_list_of_numbers_is_divided_as_a_list_of_names_is():
    numbers = [torch.tensor(i) for i in range(N)]
    assert [numbers for _, numbers in split_batch((X, numbers), 2)] == [numbers[:4], numbers[4:]]


def test_a_number_goes_with_every_part_wherever_it_is():
    parts = split_batch({"temperature": torch.tensor(0.5), "x": X}, 2)
    assert [(float(part["temperature"]), len(part["x"])) for part in parts] == [(0.5, 4)] * 2


@pytest.mark.parametrize("batch", [torch.tensor(1.0), NAMES, (NAMES,), [], (), None, "text", {"x": torch.tensor(1.0)}])
def test_without_any_length_it_is_one(batch):
    assert size_of(batch) == 1
    assert split_batch(batch, 2) == [batch] * 2


@pytest.mark.parametrize("batch", [(X, Y), {"x": X, "labels": Y}, Held(X, Y), Named(X, Y), Graph(x=X, y=Y)])
def test_class_labels_are_found(batch):
    assert torch.equal(labels_in(batch), Y)


@pytest.mark.parametrize("batch", [X, (), (X,), {"x": X, "y": X}, Held(X, None), Graph(x=X), None, "y"])
def test_what_has_no_class_labels_is_refused(batch):
    with pytest.raises(ConfigError, match="^The training data has no class labels"):
        labels_in(batch)


def test_the_tensors_of_a_graph_are_found():
    graph = Graph(x=X, edge_index=torch.zeros(2, 40), name="water", y=Y)
    assert [len(tensor) for tensor in tensors_in([graph])] == [N, 2, N]
    assert size_of(graph) == N


def test_what_belongs_together_stays_together():
    for names, held in split_batch((NAMES, Held(X, Y)), 2):
        assert names == [NAMES[int(y)] for y in held.y]
        assert torch.equal(held.x, X[held.y])
