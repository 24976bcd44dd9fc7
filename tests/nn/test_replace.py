"""Which layers others are put in the place of."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lit_pfl.errors import ConfigError
from lit_pfl.nn import factorize, hadamard

REPLACE = {"factorized": lambda module: factorize(module, start="dense"), "Hadamard": hadamard}


class Standardized(nn.Conv2d):
    """A convolution that does something to its weight."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def tied():
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    module[1].weight = module[0].weight
    return module


def hooked():
    module = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    module[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


MORE = {
    "parametrization": lambda: nn.Sequential(nn.Identity(), parametrizations.weight_norm(nn.Linear(4, 4))),
    "of its own as a Standardized": lambda: nn.Sequential(nn.Identity(), Standardized(4, 4, 3)),
    "tied weights": tied,
    "forward hooks": hooked,
    "compiled on its own": lambda: nn.ModuleDict({"1": nn.ModuleDict({"_orig_mod": nn.Linear(4, 4)})}),
}


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE.keys())
@pytest.mark.parametrize("what", MORE)
def test_layers_that_are_more_than_their_weight_are_named(what, replace):
    with pytest.raises(ConfigError, match=rf"layer '1.*' .*{what}.*, which would be lost"):
        replace(MORE[what]())


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE.keys())
def test_frozen_and_empty_layers_stay_as_they_are(replace):
    frozen, empty, learned = nn.Linear(4, 4).requires_grad_(False), nn.Linear(0, 4), nn.Linear(4, 4)
    network = replace(nn.Sequential(frozen, empty, learned))
    assert network[0] is frozen
    assert network[1] is empty
    assert network[2] is not learned


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE.keys())
def test_attention_is_what_it_was_but_for_its_layers(replace):
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
    x, before = torch.rand(2, 3, 8), {name: type(part) for name, part in network.named_modules()}
    dense = network(x)
    result = replace(network)(x)
    assert result.shape == dense.shape
    assert {name for name, part in network.named_modules() if name in before and type(part) is not before[name]} == {
        "self_attn.out_proj", "linear1", "linear2"
    }  # fmt: skip
    if replace is not hadamard:
        torch.testing.assert_close(result, dense)
