"""Hadamard layers against plain loops over the papers' index formulas."""

import itertools
import math

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn import HadamardConv2d, HadamardLinear, hadamard, hadamard_layers, rank_for_gamma, rank_for_ratio
from lit_pfl.nn.composed import is_dense


def filled(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.double()


def arrays(factors: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in factors.named_parameters()}


def kernel_by_hand(factors: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    """Sum entry by entry: W[o, i, a, b] = sum_xy T[x, y, a, b] O[x, o] I[y, i]."""
    f = arrays(factors)
    kernel = np.zeros(shape)
    for o, i, a, b in itertools.product(*map(range, shape)):
        for x, y in itertools.product(range(len(f["o"])), range(len(f["i"]))):
            kernel[o, i, a, b] += f["t"][x, y, a, b] * f["o"][x, o] * f["i"][y, i]
    return kernel


def matrix_by_hand(factors: nn.Module, out: int, inputs: int) -> np.ndarray:
    f = arrays(factors)
    matrix = np.zeros((out, inputs))
    for o, i, r in itertools.product(range(out), range(inputs), range(f["x"].shape[1])):
        matrix[o, i] += f["x"][o, r] * f["y"][i, r]
    return matrix


@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": (5, 3), "padding": (2, 1), "stride": (2, 1)},
        {"kernel_size": 3, "dilation": 2, "padding": "same"},
        {"kernel_size": 3, "groups": 2},
        {"kernel_size": 2, "groups": 2, "stride": 2, "dilation": 2},
    ],
    ids=str,
)
def test_convolution_equals_the_dense_one(personal, rank, shape):
    layer = filled(HadamardConv2d(4, 6, rank=rank, personal=personal, **shape))
    dense = nn.Conv2d(4, 6, **shape).double()
    w1, w2 = (kernel_by_hand(factors, dense.weight.shape) for factors in (layer.w1, layer.w2))
    with torch.no_grad():
        dense.weight.copy_(torch.from_numpy(w1 * (w2 + 1) if personal else w1 * w2))
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    torch.testing.assert_close(layer.weight, dense.weight)
    x = torch.randn(2, 4, 12, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x))
    channels_last = layer.to(memory_format=torch.channels_last)
    torch.testing.assert_close(channels_last(x.to(memory_format=torch.channels_last)), dense(x))


@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize(("inputs", "out", "rank"), [(5, 3, 1), (5, 3, 2), (3, 7, 4)])
def test_linear_equals_the_dense_one(personal, inputs, out, rank):
    layer = filled(HadamardLinear(inputs, out, rank=rank, personal=personal))
    w1, w2 = (matrix_by_hand(factors, out, inputs) for factors in (layer.w1, layer.w2))
    weight = torch.from_numpy(w1 * (w2 + 1) if personal else w1 * w2)
    x = torch.randn(2, 7, inputs, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias)


@pytest.mark.parametrize("personal", [False, True])
def test_every_factor_has_a_gradient(personal):
    for layer, x in (
        (HadamardConv2d(4, 6, 3, rank=2, personal=personal), torch.randn(2, 4, 8, 8)),
        (HadamardLinear(4, 6, rank=2, personal=personal), torch.randn(2, 4)),
    ):
        layer(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize("window", [(1, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("rank", [1, 6])
def test_numbers_of_parameters(window, rank):
    conv, linear = HadamardConv2d(4, 6, window, rank=rank, bias=False), HadamardLinear(7, 5, rank=rank)
    assert sum(p.numel() for p in conv.parameters()) == 2 * rank * (6 + 4 + rank * math.prod(window))
    assert sum(p.numel() for p in linear.parameters()) == 2 * rank * (5 + 7) + 5
    for layer in (conv, linear):
        assert sum(p.numel() for p in layer.w1.parameters()) == sum(p.numel() for p in layer.w2.parameters())


def test_factors_are_drawn_with_their_own_fan_in():
    """Nam et al.'s notebook: std sqrt(2 / fan_in), fan_in R F F of the core, O and I of the sides."""
    conv, linear = HadamardConv2d(200, 300, 3, rank=40), HadamardLinear(200, 300, rank=40)
    for w in (conv.w1, conv.w2):
        for factor, fan_in in ((w.t, 40 * 9), (w.o, 300), (w.i, 200)):
            assert factor.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
            assert abs(factor.mean().item()) < 0.1 * math.sqrt(2 / fan_in)
    for w in (linear.w1, linear.w2):
        for factor, fan_in in ((w.x, 300), (w.y, 200)):
            assert factor.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
    assert torch.equal(conv.bias, torch.zeros(300))
    assert not torch.equal(conv.w1.t, conv.w2.t)


def test_a_personal_weight_starts_near_w1():
    """The std of W2 is sqrt(8 R / (9 O I)) = 0.083 for the convolution and 2 sqrt(R / (O I)) = 0.14 for the other."""
    for kind, options in ((HadamardConv2d, {"kernel_size": 3, "rank": 32}), (HadamardLinear, {"rank": 20})):
        personal, plain = (
            kind(64, 64, **options, personal=personal).requires_grad_(False) for personal in (True, False)
        )
        assert (personal.weight - personal.w1()).norm() < 0.16 * personal.w1().norm()
        assert (plain.weight - plain.w1()).norm() > 0.8 * plain.w1().norm()


def test_a_small_rank_gives_full_rank():
    """Corollary 1: R^2 >= min(m, n). Two matrices of rank 5 make one of rank 25, of rank 4 only 16."""
    layer = HadamardLinear(30, 25, rank=5).double()
    assert torch.linalg.matrix_rank(layer.w1()) == torch.linalg.matrix_rank(layer.w2()) == 5
    assert torch.linalg.matrix_rank(layer.weight) == 25
    assert torch.linalg.matrix_rank(HadamardLinear(30, 25, rank=4).double().weight) == 16
    conv = HadamardConv2d(16, 20, 3, rank=4, bias=False).double()
    for unfold in (lambda w: w.flatten(1), lambda w: w.transpose(0, 1).flatten(1)):
        assert torch.linalg.matrix_rank(unfold(conv.w1())) == 4
        assert torch.linalg.matrix_rank(unfold(conv.weight)) == 16


@pytest.mark.parametrize(
    ("layer", "ratio", "rank", "parameters"),
    [
        # 256 x 256 x 3 x 3: the numbers of parameters that Nam et al.'s notebook prints
        ((256, 256, 9), 0.1, 36, 60_192),
        ((256, 256, 9), 0.3, 75, 178_050),
        ((256, 256, 9), 0.5, 103, 296_434),
        ((256, 256, 9), 0.7, 126, 414_792),
        ((256, 256, 9), 0.9, 146, 533_192),
        # by hand: 18 R^2 + 256 R = 0.72 * 36,864 has its root at 31.94
        ((64, 64, 9), 0.72, 32, 26_624),
        # 1 x 1: 2 R^2 + 256 R = 0.72 * 4,096 has its root at sqrt(64^2 + 1,474.56) - 64 = 10.64
        ((64, 64, 1), 0.72, 11, 3_058),
        # fully connected: R = 0.72 * 20,000 / (2 * 300) = 24
        ((100, 200, 0), 0.72, 24, 14_400),
        # exactly 2 * 11 * (106 + 11 * 49), where rounding errors must not make it 12
        ((10, 96, 49), 14_190 / 47_040, 11, 14_190),
        # too few inputs: sqrt(64) decides
        ((64, 3, 9), 0.72, 8, 2_224),
        ((3, 65, 0), 0.1, 9, 1_224),
    ],
)
def test_rank_for_ratio(layer, ratio, rank, parameters):
    out, inputs, window = layer
    assert rank_for_ratio(*layer, ratio) == rank
    assert 2 * rank * (out + inputs + rank * window) == parameters


@pytest.mark.parametrize(
    ("layer", "least", "most"),
    [
        ((128, 64, 25), 8, 60),  # 2 * 60 * (192 + 60 * 25) = 203,040 of 204,800, the next 209,474
        ((256, 256, 9), 16, 154),  # by hand: sqrt(28.44^2 + 32,768) - 28.44 = 154.8
        ((64, 3, 9), 2, 6),
        ((100, 400, 0), 10, 40),  # 40,000 / (2 * 500), reached exactly
        ((16, 16, 1), 4, 4),  # sqrt(16^2 + 128) - 16 = 3.6 would be below the rank that full rank takes
    ],
)
def test_rank_for_gamma(layer, least, most):
    assert [rank_for_gamma(*layer, gamma) for gamma in (0, 1)] == [least, most]
    assert rank_for_gamma(*layer, 0.5) in (math.floor((least + most) / 2), math.ceil((least + most) / 2))


def count(out: int, inputs: int, window: int, rank: int) -> int:
    return 2 * rank * (out + inputs + rank * window)


def test_ranks_are_the_smallest_and_the_largest_that_there_are():
    generator = np.random.default_rng(0)
    for _ in range(300):
        out, inputs, side = (int(generator.integers(1, high)) for high in (200, 200, 6))
        ratio, window = float(generator.uniform(0, 1)), (side - 1) ** 2
        dense = out * inputs * max(window, 1)
        rank, floor = rank_for_ratio(out, inputs, window, ratio), max(math.ceil(out**0.5), math.ceil(inputs**0.5))
        assert count(out, inputs, window, rank) >= ratio * dense - 1e-6
        assert rank == floor or count(out, inputs, window, rank - 1) < ratio * dense
        most, least = rank_for_gamma(out, inputs, window, 1.0), math.ceil(min(out, inputs) ** 0.5)
        assert count(out, inputs, window, most + 1) > dense
        assert most == least or count(out, inputs, window, most) <= dense


@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1"])
def test_hadamard_of_a_torchvision_model_in_place(name, personal):
    """With 1 x 1 and depthwise convolutions, strides and groups."""
    model = getattr(torchvision.models, name)(num_classes=5)
    dense = [m for m in model.modules() if is_dense(m)]
    shapes = [m.weight.shape for m in dense]
    assert hadamard(model.eval(), 0.1, personal=personal) is model
    layers = [layer for _, layer in hadamard_layers(model)]
    assert [layer.weight.shape for layer in layers] == shapes
    assert not [m for m in model.modules() if is_dense(m)]
    assert not any(m.training for m in model.modules())
    assert all(layer.personal is personal for layer in layers)
    with torch.no_grad():
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_every_replaced_layer_has_the_wanted_share_of_parameters():
    network = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 1), nn.Flatten(), nn.Linear(64, 100))
    dense = [m.weight.numel() for m in network if hasattr(m, "weight")]
    for size, (_, layer) in zip(dense, hadamard_layers(hadamard(network, 0.8)), strict=True):
        share = sum(p.numel() for name, p in layer.named_parameters() if name != "bias") / size
        assert 0.8 <= share < 0.9


def test_a_layer_keeps_its_type_and_has_no_bias_that_the_dense_one_lacks():
    layer = hadamard(nn.Conv2d(4, 4, 3, bias=False).double())
    assert layer.bias is None
    assert layer.w1.t.dtype == torch.float64


def test_errors():
    with pytest.raises(ConfigError, match="rank of 1 or more, not 0"):
        HadamardLinear(2, 2, rank=0)
    with pytest.raises(ConfigError, match="groups=3 must divide in_channels=4"):
        HadamardConv2d(4, 6, 3, groups=3, rank=1)
    with pytest.raises(ConfigError, match="groups=4 must divide .* out_channels=6"):
        HadamardConv2d(4, 6, 3, groups=4, rank=1)
    with pytest.raises(ConfigError, match="padding_mode='reflect'"):
        hadamard(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(ConfigError, match="rank_rule='largest' .* choose one of ratio, gamma"):
        hadamard(nn.Linear(2, 2), rank_rule="largest")
    with pytest.raises(ConfigError, match="ratio=-0.1"):
        hadamard(nn.Linear(2, 2), -0.1)
    with pytest.raises(ConfigError, match="ratio=1.5: .* from 0 to 1"):
        hadamard(nn.Linear(2, 2), 1.5, "gamma")
