"""What weights are made simple to."""

import pytest
import torch

from lit_pfl.methods.factorized.structures import STRUCTURES


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STRUCTURES)
def test_weights_of_every_type_are_shrunk_and_counted(name, dtype):
    structure = STRUCTURES[name]
    weight = torch.zeros(8, 6, dtype=dtype)
    weight[:2, :2] = torch.eye(2) * 2
    shrunk = structure.shrink({"weight": weight}, 0.5, {})["weight"]
    assert shrunk.dtype == dtype
    torch.testing.assert_close(shrunk, 0.75 * weight)
    assert structure.size(shrunk) == {"low_rank": 2 * (8 + 6), "sparse": 2}[name]
