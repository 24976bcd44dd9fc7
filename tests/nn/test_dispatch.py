"""Networks that look in ``forward`` at which of their layers are linear."""

import pytest
import torch
from torch import nn

from lit_pfl.nn import factorize, hadamard


class Conditioned(nn.Module):
    """Its linear layers, and no others, get a condition beside their input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(9, 2)])

    def forward(self, x, condition):
        for layer in self.layers:
            x = layer(torch.cat([x, condition], 1) if isinstance(layer, nn.Linear) else x)
        return x


REPLACING = {"factorize": factorize, "hadamard": hadamard}


@pytest.mark.parametrize("name", REPLACING)
def test_a_layer_in_the_place_of_a_linear_one_is_taken_for_one(name):
    network = REPLACING[name](Conditioned())
    names = {parameter for parameter, _ in network.named_parameters()}
    assert not {"layers.0.weight", "layers.2.weight"} & names
    assert network(torch.rand(3, 4), torch.rand(3, 1)).shape == (3, 2)
    again = REPLACING[name](network)
    assert {parameter for parameter, _ in again.named_parameters()} == names
