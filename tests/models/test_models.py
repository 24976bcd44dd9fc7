"""Backbones: shapes and the papers' parameter counts."""

import pytest
import torch
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg
from lit_pfl.models import CNN, MLP, VGG9, VGG16, MobileNetV1, ResNet9, ResNet18
from lit_pfl.nn import factorize, factorized_layers
from tiny import digits, run


def count(module, *leaves):
    return sum(p.numel() for n, p in module.named_parameters() if not leaves or n.rpartition(".")[2] in leaves)


def kinds(module):
    return [type(layer).__name__ for layer in module]


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


def test_the_seeded_weights_and_names_of_resnet9_stay_as_they_were():
    """Checkpoints and seeds of older runs: eight convolutions and the classifier, drawn in this order, and no more."""
    paths = ["0.0", "1.0", "2.0.0", "2.1.0", "3.0", "5.0.0", "5.1.0", "6.0"]
    shapes = [(3, 2, 3), (2, 4, 5), (4, 4, 3), (4, 4, 3), (4, 8, 3), (8, 8, 3), (8, 8, 3), (8, 8, 3)]
    torch.manual_seed(5)
    expected = {
        f"body.{path}.weight": nn.Conv2d(*shape, bias=False).weight for path, shape in zip(paths, shapes, strict=True)
    }
    head = nn.Linear(8, 10)
    expected |= {"head.weight": head.weight, "head.bias": head.bias}
    torch.manual_seed(5)
    state = ResNet9(width=2).state_dict()
    norms = {f"body.{path[:-1]}1." for path in paths}
    assert {name for name in state if name.rpartition(".")[0] + "." not in norms} == set(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("make", [ResNet9, ResNet18])
@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({}, []),
        ({"fc_layers": 2}, ["Linear", "ReLU"]),
        ({"fc_layers": 2, "fc_norm": True}, ["Linear", "BatchNorm1d", "ReLU"]),
    ],
    ids=str,
)
def test_the_rows_of_fig_8h(make, options, added):
    model, plain = make(3, 7, 4, **options), make(3, 7, 4)
    features = model.head.in_features
    assert features == plain.head.in_features == {ResNet9: 16, ResNet18: 32}[make]
    assert kinds(model.body) == kinds(plain.body) + added
    assert isinstance(model.head, nn.Linear)
    hidden = count(model) - count(plain)
    assert hidden == (("Linear" in added) * (features + 1) + ("BatchNorm1d" in added) * 2) * features
    x = torch.randn(4, 3, 32, 32)
    embedding = model.body(x)
    assert embedding.shape == (4, features)
    assert not added or embedding.min() == 0
    assert model(x).shape == (4, 7)
    factorize(model)
    layers = [path for path, _ in factorized_layers(model)]
    assert len(layers) == {ResNet9: 8, ResNet18: 20}[make] + 1 + ("Linear" in added)


@pytest.mark.parametrize("make", [ResNet9, ResNet18])
def test_other_heads_are_refused(make):
    for number in (0, 3):
        with pytest.raises(ConfigError, match=f"fc_layers={number}: choose 1, the classifier, or 2"):
            make(fc_layers=number, width=2)
    with pytest.raises(ConfigError, match=r"fc_norm=true is for the hidden layer that model\.backbone\.fc_layers=2"):
        make(fc_norm=True, width=2)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"classes": 10}, 11_173_962),
        ({"classes": 10, "norm": "group", "bias": False}, 11_173_952),
        ({"classes": 100, "norm": "group", "bias": False}, 11_220_032),
        ({"classes": 200, "norm": "group", "stem": "large"}, 11_279_112),
    ],
    ids=["Factorized-FL", "FedSLR, CIFAR-10", "FedSLR, CIFAR-100", "FedSLR, Tiny-ImageNet"],
)
def test_resnet18_has_the_papers_number_of_parameters(options, parameters):
    model = ResNet18(**options)
    assert count(model) == parameters
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    if options.get("stem") != "large":
        assert sum(count(m) for m in convolutions) == 11_159_232
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm | nn.BatchNorm2d)]
    assert sum(count(m) for m in norms) == 9_600
    assert all(m.num_groups == 2 for m in norms if isinstance(m, nn.GroupNorm))
    assert not any(m.bias is not None for m in convolutions)


def test_resnet18_is_the_known_network():
    """With the large stem and all weights alike, it computes what torchvision's does."""
    torchvision = pytest.importorskip("torchvision")
    theirs, ours = torchvision.models.resnet18(num_classes=7), ResNet18(3, 7, stem="large")
    # theirs registers a block's shortcut after its second norm, as ours does
    tensors = [t for name, t in theirs.state_dict().items()]
    own = ours.state_dict()
    assert [t.shape for t in own.values()] == [t.shape for t in tensors]
    ours.load_state_dict(dict(zip(own, tensors, strict=True)))
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_resnet18_halves_small_images_three_times_and_large_ones_five_times():
    x = torch.randn(2, 3, 64, 64)
    for stem, side in (("small", 8), ("large", 2)):
        model = ResNet18(width=4, stem=stem, norm="group")
        before_pooling = model.body[: kinds(model.body).index("AdaptiveAvgPool2d")]
        assert before_pooling(x).shape == (2, 32, side, side)
        assert model.body(x).shape == (2, 32)


def test_a_norm_or_stem_that_there_is_not():
    with pytest.raises(ConfigError, match=r"model\.backbone\.norm='layer': choose one of batch, group"):
        ResNet18(norm="layer")
    with pytest.raises(ConfigError, match=r"model\.backbone\.stem='tiny': choose one of small, large"):
        ResNet18(stem="tiny")


def test_vgg9_has_the_papers_number_of_parameters_and_order():
    model = VGG9()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert count(model) == 3_491_530
    linears = [m for m in model.body if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == [(4096, 512), (512, 512)]
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    conv, pool = ["Conv2d", "ReLU"], ["MaxPool2d"]
    assert kinds(model.body) == [
        *conv, *conv, *pool, *conv, *conv, *pool, "Dropout2d", *conv, *conv, *pool,
        "Flatten", "Dropout", "Linear", "ReLU", "Linear", "ReLU", "Dropout",
    ]  # fmt: skip
    assert [m.out_channels for m in model.body if isinstance(m, nn.Conv2d)] == [32, 64, 128, 128, 256, 256]
    assert [m.p for m in model.body if isinstance(m, nn.Dropout | nn.Dropout2d)] == [0.05, 0.1, 0.1]


def test_vgg9_as_he_draws_it_keeps_the_size_of_signals():
    model = VGG9(3, 10, width=16, init="he").eval()
    images = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        logits, faded = model(images), VGG9(3, 10, width=16).eval()(images)
    for layer in [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]:
        assert type(layer) in (nn.Conv2d, nn.Linear)  # no longer lazy
        assert float(layer.weight.square().mean()) == pytest.approx(2 / layer.weight[0].numel(), rel=0.15)
        assert not layer.bias.any()
    assert 0.1 < logits.std(0).mean() < 10
    assert faded.std(0).mean() < 0.01


def test_vgg9_takes_other_images():
    model = VGG9(1, 7, width=2)
    assert model.body(torch.randn(2, 1, 28, 28)).shape == (2, 32)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 7)


def test_small_networks():
    cnn, mlp = CNN(), MLP()
    assert cnn(torch.randn(2, 1, 28, 28)).shape == mlp(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert count(cnn) == 582_026
    assert count(mlp) == 199_210


@pytest.mark.seconds
def test_the_default_network_is_as_wide_as_suits_the_data():
    """A first try should be quick; what the papers use is in their configurations."""
    federation = run(FedAvg(), digits(2, image_size=16, batch_size=16), rounds=1)
    assert count(federation.clients[0]) == count(ResNet9(1, 10, width=8))
    assert federation.clients[0].upload().nbytes < 200_000


def test_vgg16_has_the_papers_layers():
    model = VGG16(norm=None)
    assert count(model.body) == 14_714_688
    assert count(model) == 14_719_818
    assert count(VGG16()) == 14_719_818 + 8_448
    widths = [layer.out_channels for layer in VGG16().body if isinstance(layer, nn.Conv2d)]
    assert widths == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert VGG16(1, 7, width=2)(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_mobilenet_has_the_papers_number_of_parameters():
    model = MobileNetV1()
    convolutions = [layer for layer in model.body if isinstance(layer, nn.Conv2d)]
    assert sum(layer.weight.numel() for layer in convolutions) == 3_185_088
    assert count(model) == 3_185_088 + 21_888 + 10_250
    assert [layer.groups for layer in convolutions[:5]] == [1, 32, 1, 64, 1]
    assert [layer.out_channels for layer in convolutions[::2]] == [32, 64, 128, 128, 256, 256, *[512] * 6, 1024, 1024]
    assert model.body[:-2](torch.randn(2, 3, 32, 32)).shape == (2, 1024, 2, 2)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_norm_follows_every_convolution_of_vgg9(norm):
    kind = {"batch": "BatchNorm2d", "group": "GroupNorm"}[norm]
    names = kinds(VGG9(norm=norm).body)
    assert [names[i + 1] for i, name in enumerate(names) if name == "Conv2d"] == [kind] * 6
    assert kind not in kinds(VGG9().body)


@pytest.mark.parametrize("make", [VGG9, VGG16, MobileNetV1, ResNet18])
def test_a_norm_that_there_is_not(make):
    with pytest.raises(ConfigError, match=r"model.backbone.norm='layer'.*batch, group"):
        make(norm="layer")


@pytest.mark.parametrize("hidden", [0, -1])
def test_an_mlp_has_units(hidden):
    with pytest.raises(ConfigError, match=rf"^model\.backbone\.hidden={hidden}: give 1 unit or more"):
        MLP(hidden=hidden)
