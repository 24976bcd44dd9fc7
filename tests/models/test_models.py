"""Backbones: shapes and the papers' parameter counts."""

import pytest
import torch

from lit_pfl.models import CNN, MLP, ResNet9
from lit_pfl.nn import factorize, factorized_layers


def count(module, *leaves):
    return sum(p.numel() for n, p in module.named_parameters() if not leaves or n.rpartition(".")[2] in leaves)


def test_resnet9_has_the_papers_number_of_parameters():
    model = ResNet9()
    assert count(model) == 2_571_338
    assert sum(t.numel() for t in model.state_dict().values()) == 2_574_290
    assert count(model.head) == 2_570


@pytest.mark.parametrize(
    ("form", "u", "v"), [("IFxOF", 3_785, 4_672), ("FFxIO", 88, 270_528)], ids=["SimFed", "Factorized-FL"]
)
def test_factorized_resnet9_has_the_papers_number_of_factors(form, u, v):
    body = factorize(ResNet9(), form).body
    assert (count(body, "u"), count(body, "v"), count(body, "mu")) == (u, v, 2_565_824)
    assert len(list(factorized_layers(body))) == 8


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("width", [8, 64])
def test_resnet9_embeds_and_classifies(size, width):
    model = ResNet9(3, 7, width)
    x = torch.randn(2, 3, size, size)
    assert model.body(x).shape == (2, 4 * width)
    assert model(x).shape == (2, 7)


def test_small_networks():
    cnn, mlp = CNN(), MLP()
    assert cnn(torch.randn(2, 1, 28, 28)).shape == mlp(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert count(cnn) == 582_026
    assert count(mlp) == 199_210
