"""Factorized layers against dense ones with the weight built by hand."""

import pytest
import torch
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn import FactorizedConv2d, FactorizedLinear, factorize, l1_norm_of_masks


def filled(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.double()


def weight_by_hand(conv: FactorizedConv2d) -> torch.Tensor:
    """Entry by entry, from the papers' index formulas."""
    out, inputs, height, width = conv.weight_shape
    weight = torch.zeros(out, inputs, height, width, dtype=torch.float64)
    for o in range(out):
        for i in range(inputs):
            for a in range(height):
                for b in range(width):
                    if conv.form == "IFxOF":
                        product = conv.u[i * height + a] @ conv.v[o * width + b]
                    else:
                        product = conv.u[a * width + b] @ conv.v[i * out + o]
                    weight[o, i, a, b] = product + conv.mu[o, i, a, b]
    return weight.detach()


@pytest.mark.parametrize("form", ["IFxOF", "FFxIO"])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 4, "padding": 2},
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": (5, 3), "padding": (2, 1), "stride": (2, 1)},
        {"kernel_size": 3, "dilation": 2, "padding": "same"},
        {"kernel_size": 3, "groups": 2},
    ],
    ids=str,
)
def test_convolution_equals_the_dense_one(form, rank, shape):
    layer = filled(FactorizedConv2d(4, 6, form=form, rank=rank, **shape))
    dense = nn.Conv2d(4, 6, **shape).double()
    with torch.no_grad():
        dense.weight.copy_(weight_by_hand(layer))
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    x = torch.randn(2, 4, 12, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [1, 2])
def test_linear_equals_the_dense_one(rank):
    layer = filled(FactorizedLinear(5, 3, rank=rank))
    x = torch.randn(7, 5, dtype=torch.float64)
    expected = x @ (layer.u @ layer.v.T + layer.mu.T) + layer.bias
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=0)


def test_u_of_the_base_filter_form_indexes_spatial_positions():
    """One entry of u moves one tap of the window, in every filter of every channel, and nothing else."""
    layer = filled(FactorizedConv2d(4, 6, 3, form="FFxIO"))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.u[3 * 1 + 2] += 1  # row 1, column 2
    moved = (layer.weight - before).abs() > 1e-12
    assert moved[:, :, 1, 2].all()
    assert moved.sum() == 4 * 6


@pytest.mark.parametrize("form", ["IFxOF", "FFxIO"])
def test_mu_is_zero_at_first_and_everything_has_a_gradient(form):
    layer = FactorizedConv2d(4, 6, 3, form=form)
    assert torch.equal(layer.mu, torch.zeros(6, 4, 3, 3))
    assert torch.equal(layer.bias, torch.zeros(6))
    layer(torch.randn(2, 4, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_the_l1_norm_makes_mu_shrink():
    layer = FactorizedConv2d(4, 6, 3)
    nn.init.normal_(layer.mu)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.01), layer.mu.abs().sum().item()
    u = layer.u.detach().clone()
    for _ in range(10):
        optimizer.zero_grad()
        l1_norm_of_masks(layer).backward()
        optimizer.step()
    assert layer.mu.abs().sum() < before - 10
    assert torch.equal(layer.u, u)


def test_rank_one_and_mu_represent_any_weight():
    layer, wanted = FactorizedConv2d(4, 6, 3).double(), torch.randn(6, 4, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.mu.copy_(wanted - layer.weight)
    torch.testing.assert_close(layer.weight, wanted)


def test_without_mask():
    layer = FactorizedConv2d(4, 6, 3, mask=False)
    assert layer.mu is None
    assert layer.weight.shape == (6, 4, 3, 3)
    assert l1_norm_of_masks(layer) == 0


def test_errors():
    with pytest.raises(ConfigError, match="form='XY'"):
        FactorizedConv2d(1, 1, 3, form="XY")
    with pytest.raises(ConfigError, match="rank of 1 or more, not 0"):
        FactorizedLinear(2, 2, rank=0)
    with pytest.raises(ConfigError, match="padding_mode='reflect'"):
        factorize(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"))
