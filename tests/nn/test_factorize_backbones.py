"""Factorization of whole networks."""

import pytest
import torch
import torchvision
from torch import nn

from lit_pfl.models import VGG9, ResNet18, TorchvisionModel
from lit_pfl.nn import FactorizedConv2d, factorize, factorized_layers
from lit_pfl.nn.composed import is_dense

MODELS = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=5),  # 1 x 1 shortcuts
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(num_classes=5),  # depthwise, squeeze-excitation
    "resnext50": lambda: torchvision.models.resnext50_32x4d(num_classes=5),  # grouped
    "VGG9": lambda: built(VGG9(3, 5, width=4)),  # biases
    "ResNet18": lambda: ResNet18(3, 5, width=8),
    "ResNet18, FedSLR": lambda: ResNet18(3, 5, width=8, norm="group", bias=False, fc_layers=2),
    "TorchvisionModel": lambda: TorchvisionModel(3, 5, "mobilenet_v2"),
}


def built(model):
    model(torch.zeros(1, 3, 64, 64))
    return model


def layers_of(model):
    return {path: m for path, m in model.named_modules() if is_dense(m)}


def sizes_of_factors(layer, form, rank):
    """Number of elements of u and v, from the papers' definitions."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * rank, layer.out_features * rank
    out, inputs, height, width = layer.weight.shape
    rows, columns = {
        "IFxOF": (inputs * height, out * width),
        "FFxIO": (height * width, inputs * out),
    }[form]
    return rows * rank, columns * rank


@pytest.mark.few(7)
@pytest.mark.parametrize(("form", "rank"), [("IFxOF", 1), ("FFxIO", 2)])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_replaced_in_place_and_learns(name, form, rank):
    model = MODELS[name]()
    dense = layers_of(model)
    others = {path: type(m) for path, m in model.named_modules() if path not in dense}
    assert factorize(model, form, rank) is model
    factorized = dict(factorized_layers(model))
    assert factorized.keys() == dense.keys()
    assert not layers_of(model)
    assert {path: type(m) for path, m in model.named_modules() if path not in dense} == others
    for path, layer in dense.items():
        new = factorized[path]
        assert new.weight.shape == layer.weight.shape == new.mu.shape
        assert (new.u.numel(), new.v.numel()) == sizes_of_factors(layer, form, rank), path
        assert (new.bias is None) == (layer.bias is None)
        if isinstance(layer, nn.Conv2d):
            for attribute in ("stride", "padding", "dilation", "groups"):
                assert getattr(new, attribute) == getattr(layer, attribute), path

    logits = model(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    nn.functional.cross_entropy(logits, torch.tensor([1, 4])).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    for path, layer in factorized.items():  # those that the gradient of the loss cannot miss
        if path == list(factorized)[-1]:
            assert layer.u.grad.abs().sum() > 0
            assert layer.v.grad.abs().sum() > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_factorized_network_computes_what_the_dense_one_with_its_weights_does(name):
    dense = MODELS[name]().eval()
    model = factorize(MODELS[name]().eval(), "FFxIO")
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        state = {path: t for path, t in model.state_dict().items() if path.rpartition(".")[2] not in ("u", "v", "mu")}
        for path, layer in factorized_layers(model):
            nn.init.normal_(layer.mu, std=0.02)
            state[f"{path}.weight"] = layer.weight
        dense.load_state_dict(state)
        x = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


def test_the_special_layers_are_there_at_all():
    resnet = [layer for _, layer in factorized_layers(factorize(MODELS["ResNet18"](), "FFxIO"))]
    shortcuts = [m for m in resnet if isinstance(m, FactorizedConv2d) and m.weight_shape[2:] == (1, 1)]
    assert [m.u.shape for m in shortcuts] == [(1, 1)] * 3  # u of a 1 x 1 convolution is one number
    assert [m.stride for m in shortcuts] == [(2, 2)] * 3
    resnext = [layer for _, layer in factorized_layers(factorize(MODELS["resnext50"]()))]
    assert sum(getattr(m, "groups", 1) == 32 for m in resnext) == 16
    mobile = [layer for _, layer in factorized_layers(factorize(MODELS["mobilenet_v3_small"]()))]
    assert sum(getattr(m, "groups", 1) == m.weight_shape[0] > 1 for m in mobile) == 11  # one a block
