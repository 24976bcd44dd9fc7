"""How factorized weights start, against dense layers and the papers' index formulas."""

import math

import numpy as np
import pytest
import torch
from test_factorize_backbones import MODELS
from torch import nn

from lit_pfl.data import Digits
from lit_pfl.errors import ConfigError
from lit_pfl.models import ResNet9
from lit_pfl.nn import FactorizedConv2d, FactorizedLinear, factorize, factorized_layers

READINGS = [("IFxOF", "spatial"), ("FFxIO", "spatial"), ("FFxIO", "rawview")]
LAYERS = {
    "linear": lambda: nn.Linear(5, 3),
    "linear without a bias": lambda: nn.Linear(3, 7, bias=False),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "1 x 1": lambda: nn.Conv2d(4, 6, 1, bias=False),
    "not square": lambda: nn.Conv2d(4, 6, (5, 3), stride=2, padding=(2, 1)),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, groups=6),
}


def matrix_by_hand(layer, weight: torch.Tensor) -> np.ndarray:
    """Put every entry of a weight where its factors' row and column say, from the papers' index formulas."""
    entries = np.zeros((len(layer.u), len(layer.v)))
    for at, value in np.ndenumerate(weight.numpy()):
        if isinstance(layer, FactorizedLinear):
            row, column = at[::-1]
        elif layer.pi == "rawview":
            row, column = divmod(int(np.ravel_multi_index(at, weight.shape)), len(layer.v))
        else:
            (o, i, a, b), (out, _, height, width) = at, weight.shape
            row, column = (i * height + a, o * width + b) if layer.form == "IFxOF" else (a * width + b, i * out + o)
        entries[row, column] = value
    return entries


@pytest.mark.parametrize("rank", [1, 2, 30])
@pytest.mark.parametrize(("form", "pi"), READINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_dense_start_is_the_layer_that_is_replaced(name, form, pi, rank):
    dense = LAYERS[name]()
    layer = factorize(dense, form, rank, pi=pi, start="dense")
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode).weight, dense.weight, atol=1e-6, rtol=0)
    if dense.bias is not None:
        assert torch.equal(layer.bias, dense.bias)
    matrix = matrix_by_hand(layer, dense.weight.detach())
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    np.testing.assert_allclose((layer.u @ layer.v.T).detach(), best, atol=1e-6)
    np.testing.assert_allclose(matrix_by_hand(layer, layer.mu.detach()), matrix - best, atol=1e-6)


@pytest.mark.parametrize(("form", "pi"), READINGS)
def test_without_a_mask_a_dense_start_is_the_best_approximation_alone(form, pi):
    dense = nn.Conv2d(4, 6, 3)
    layer = factorize(dense, form, rank=2, mask=False, pi=pi, start="dense")
    left, values, right = np.linalg.svd(matrix_by_hand(layer, dense.weight.detach()), full_matrices=False)
    made = matrix_by_hand(layer, layer.weight.detach())
    np.testing.assert_allclose(made, (left[:, :2] * values[:2]) @ right[:2], atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_dense_start_of_a_network_is_that_network(name):
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # as if trained: not what any layer draws by itself
        nn.init.normal_(parameter, std=0.05)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(factorize(model, "FFxIO", start="dense")(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [torch.zeros(6, 4, 3, 3), torch.ones(6, 4, 3, 3)], ids=["zeros", "rank 1"])
def test_columns_that_a_weight_has_no_use_for_can_learn(weight):
    dense = nn.Conv2d(4, 6, 3)
    dense.weight.data = weight
    layer = factorize(dense, "FFxIO", rank=3, mask=False, start="dense")
    torch.testing.assert_close(layer.weight, weight, atol=1e-6, rtol=0)
    layer(torch.randn(2, 4, 8, 8)).square().sum().add(layer(torch.randn(2, 4, 8, 8)).sum()).backward()
    assert (layer.v.grad.abs().amax(0) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dense_start_keeps_the_type(dtype):
    dense = nn.Conv2d(4, 6, 3).to(dtype)
    layer = factorize(dense, start="dense")
    assert {p.dtype for p in layer.parameters()} == {dtype}
    torch.testing.assert_close(layer.weight, dense.weight, atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_shapes_need_no_memory():
    assert factorize(nn.Conv2d(4, 6, 3, device="meta"), start="dense").weight.shape == (6, 4, 3, 3)
    with torch.device("meta"):
        assert factorize(ResNet9(3, 10, width=4), "FFxIO", start="dense").head.mu.shape == (10, 16)


@pytest.mark.parametrize("mask", [True, False])
def test_the_released_start_draws_mask_and_bias_of_linear_layers(mask):
    model = factorize(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Linear(200, 100)), mask=mask, start="released")
    conv, linear = (layer for _, layer in factorized_layers(model))
    assert not any(t.any() for t in (conv.mu, conv.bias) if t is not None)
    for tensor, bound in ((linear.mu, math.sqrt(6 / 300)), (linear.bias, math.sqrt(6 / 101))):
        if tensor is not None:
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert abs(tensor.mean()) < 0.2 * bound
    assert factorize(nn.Linear(3, 2, bias=False), start="released").bias is None


def test_the_papers_start_draws_the_same_as_the_layer_itself():
    torch.manual_seed(4)
    layer = factorize(nn.Conv2d(4, 6, 3, bias=False), "FFxIO", start="paper")
    torch.manual_seed(4)
    nn.Conv2d(4, 6, 3, bias=False)
    other = FactorizedConv2d(4, 6, 3, form="FFxIO", bias=False)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_the_classifiers_mask_is_what_the_released_code_learns_by():
    """With lr 1e-3 and momentum 0.9, after 40 steps, from a mask drawn in the classifier alone."""
    data = Digits(num_clients=1, image_size=16, batch_size=64)
    data.prepare_data()
    data.setup("fit")
    train = data.client(0).train

    def loss_after_40_steps(start: str) -> float:
        torch.manual_seed(0)
        model = factorize(ResNet9(1, 10, width=16), "FFxIO", start=start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        losses: list[float] = []
        while len(losses) < 40:
            for images, labels in train:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return float(np.mean(losses[35:40]))

    assert loss_after_40_steps("released") <= loss_after_40_steps("paper") / 5


def test_errors():
    with pytest.raises(ConfigError, match="start='sparse' is not a way to start; choose one of paper, released, dense"):
        factorize(nn.Linear(2, 2), start="sparse")
    broken = nn.Linear(3, 2)
    nn.init.constant_(broken.weight, torch.nan)
    with pytest.raises(ConfigError, match=r"FactorizedLinear\(3, 2, .*holds NaN or infinity"):
        factorize(broken, start="dense")
