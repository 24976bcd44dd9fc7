"""Copies of batches for steps that may change them in place."""

import pytest
import torch
from torch import Tensor, nn

from lit_pfl.learners.steps import own_batch


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def clone(self) -> "Graph":
        return Graph(self.x.clone())


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_copy_has_tensors_of_its_own(kind):
    batch = kind([torch.ones(2), torch.zeros(2)])
    copy = own_batch(batch)
    copy[0].add_(1)
    assert type(copy) is kind
    assert batch[0].tolist() == [1, 1]
    assert copy[0].tolist() == [2, 2]


def test_so_has_that_of_what_is_nested_or_knows_how_to_copy_itself():
    x = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    nested = own_batch({"inputs": {"x": x}, "names": ["a"], "packed": packed})
    nested["inputs"]["x"].add_(1)
    nested.pop("names")
    own_batch(Graph(x)).x.add_(1)
    own_batch(x).add_(1)
    nested["packed"].data.add_(1)
    own_batch((Graph(x), x))[0].x.add_(1)
    assert packed.data.tolist() == x.tolist() == [1, 1]
