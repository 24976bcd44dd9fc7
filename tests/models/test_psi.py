"""The Psi form of networks: isolated groups, trimmed logits, widths, counts, and what cannot be divided."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_pfl.errors import ConfigError
from lit_pfl.models import CNN, MLP, VGG9, VGG16, Backbone, MobileNetV1, ResNet9, ResNet18, TorchvisionModel, psi
from lit_pfl.nn import GroupedBatchNorm, GroupedConv2d, GroupedNorm, grouped_layers, row_groups, trim
from tiny import Parts


def torchvision_model(name: str):
    return lambda: TorchvisionModel(classes=6, name=name)


NETWORKS = {
    "VGG9": lambda: VGG9(3, 6, width=2, norm="batch"),
    "VGG9 without norm": lambda: VGG9(3, 6, width=2),
    "VGG16": lambda: VGG16(3, 6, width=2),
    "MobileNetV1": lambda: MobileNetV1(3, 6, width=3),
    "ResNet9": lambda: ResNet9(3, 6, width=3),
    "ResNet18": lambda: ResNet18(3, 6, width=4),
    "ResNet18 with group norm": lambda: ResNet18(3, 6, width=4, norm="group"),
    "CNN": lambda: CNN(3, 6),
    "MLP": lambda: MLP(3, 6),
    **{
        f"torchvision's {name}": torchvision_model(name)
        for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf", "mnasnet0_5")
    },
}  # fmt: skip
SMALL = [name for name in NETWORKS if "torchvision" not in name]


def made(name: str, **options) -> Backbone:
    torch.manual_seed(3)
    network = NETWORKS[name]()
    network.eval()(torch.randn(2, 3, 32, 32))
    return psi(network, 3, **options).eval()


def images(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("boundary", ["split", "full"])
def test_no_gradient_crosses_from_group_to_group(name, boundary):
    network = made(name, boundary=boundary)
    rows = row_groups(network)
    parameters = dict(network.named_parameters())
    shared = {parameter for parameter in parameters if parameter not in rows}
    logits = network(images())
    touched = {name: torch.zeros(len(parameters[name]), dtype=torch.bool) for name in rows if name in parameters}
    for c in range(6):
        gradients = torch.autograd.grad(logits[:, c].sum(), list(parameters.values()), retain_graph=True,
                                        allow_unused=True, materialize_grads=True)  # fmt: skip
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in rows:
                reached = gradient.flatten(1).ne(0).any(1) if gradient.dim() > 1 else gradient.ne(0)
                assert not reached[rows[parameter] != c // 2].any(), parameter
                touched[parameter] |= reached
            elif boundary == "full" and name in ("VGG9", "ResNet9"):  # others have units that no image here wakes
                assert gradient.ne(0).any(), parameter
    assert shared
    assert all(reached.any() for reached in touched.values())


@pytest.mark.few(8)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("boundary", ["split", "full"])
@pytest.mark.parametrize("kept", [[1], [0, 2]])
def test_trimmed_logits_are_those_of_the_whole(name, boundary, kept):
    network = made(name, boundary=boundary)
    with torch.no_grad():
        whole = network(images())
        own = trim(copy.deepcopy(network), kept)(images())
    known = [c for c in range(6) if c // 2 in kept]
    torch.testing.assert_close(own[:, known], whole[:, known], rtol=1e-4, atol=1e-5)
    assert torch.isneginf(own[:, [c for c in range(6) if c not in known]]).all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("depth", range(4))
def test_at_any_depth(name, depth):
    boundary = "full" if depth == 0 else "split"
    network = made(name, depth=min(depth, 2) if name in ("CNN", "MLP") else depth, boundary=boundary)
    with torch.no_grad():
        whole, own = network(images()), trim(network, [1])(images())
    torch.testing.assert_close(own[:, [2, 3]], whole[:, [2, 3]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["VGG9", "MobileNetV1", "ResNet18"])
def test_parameters_and_work_fall_with_the_groups(name):
    network = made(name)
    rows = row_groups(network)
    whole = {n: p.numel() for n, p in network.named_parameters()}
    work = multiply_adds(network)
    per_group = sum(whole[n] for n in rows if n in whole) // 3
    shared_work = work - 3 * (work - multiply_adds(trim(copy.deepcopy(network), [0, 1])))
    for kept in ([2], [0, 1]):
        own = trim(copy.deepcopy(network), kept)
        count = sum(p.numel() for p in own.parameters())
        assert count == sum(whole[n] for n in whole if n not in rows) + len(kept) * per_group
        assert multiply_adds(own) == shared_work + (work - shared_work) * len(kept) // 3
    assert 0 < shared_work < work


def multiply_adds(network: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(images(1))
    return counter.get_total_flops() // 2


def test_the_work_of_a_group_counted_by_hand():
    network = made("VGG9", depth=5)  # groups: the last convolution, 16 -> 15 channels of 8 x 8 pixels, and what follows
    work, trimmed = multiply_adds(network), multiply_adds(trim(network, [0, 1]))
    assert work - trimmed == 5 * 5 * 9 * 64 + 5 * 16 * 11 + 11 * 11 + 2 * 11


def test_widths_are_rounded_only_where_groups_need_it():
    def widths(network: Backbone) -> list[int]:
        return [len(m.weight) for m in network.body.modules() if isinstance(m, nn.Conv2d)]

    expected = {
        10: [*[64] * 2, *[128] * 2, *[256] * 3, 512, 512, *[510] * 4],
        20: [*[64] * 2, *[128] * 2, *[256] * 3, 512, 512, *[520] * 4],
        100: [*[64] * 2, *[128] * 2, *[256] * 3, 512, 512, *[500] * 4],
    }
    for groups, numbers in expected.items():
        numbers[8] = numbers[9]  # the last shared one, C4-2
        assert widths(psi(VGG16(3, 100), groups)) == numbers
    assert widths(psi(VGG16(3, 100), 20, depth=2))[1:7] == [60, 120, 120, 260, 260, 260]
    assert widths(psi(VGG16(3, 100), 10, boundary="full"))[8] == 512
    body = psi(VGG16(3, 100), 10).body
    assert [m.groups for m in body.modules() if isinstance(m, nn.Conv2d)] == [1] * 9 + [10] * 4


def test_what_stays_shared_keeps_its_weights():
    plain = NETWORKS["ResNet9"]()
    before = copy.deepcopy(plain.state_dict())
    after = psi(plain, 3).state_dict()
    shared = [name for name in after if name.startswith(("body.0.", "body.1."))]
    assert len(shared) == 12
    assert all(torch.equal(after[name], before[name]) for name in shared)
    assert after.keys() == before.keys() - {n for n in before if "running" in n or "tracked" in n} | {
        n for n in after if "running" in n or "tracked" in n
    }


@pytest.mark.parametrize("name", SMALL)
def test_with_one_group_nothing_changes(name):
    plain = NETWORKS[name]().eval()
    plain(images())
    assert psi(plain, 1) is plain


@pytest.mark.parametrize("name", SMALL)
def test_the_dense_form_has_the_same_widths_and_no_groups(name):
    grouped, dense = made(name), made(name, structure="dense")
    assert not list(grouped_layers(dense))
    for (one, a), (other, b) in zip(grouped.named_parameters(), dense.named_parameters(), strict=True):
        assert (one, len(a)) == (other, len(b))
    assert dense(images()).shape == (2, 6)
    reached = torch.autograd.grad(dense(images())[:, 0].sum(), list(dense.body.parameters()), materialize_grads=True,
                                  allow_unused=True)  # fmt: skip
    assert reached[-1].ne(0).sum() > len(reached[-1]) / 3 or name in ("CNN", "MLP")


def test_norms_of_grouped_layers():
    def kinds(network: Backbone) -> list[type]:
        return [type(m) for m in network.modules() if isinstance(m, nn.GroupNorm | nn.modules.batchnorm._BatchNorm)]

    assert kinds(made("VGG9")) == [nn.BatchNorm2d] * 4 + [GroupedNorm] * 2
    assert kinds(made("VGG9", norm="keep")) == [nn.BatchNorm2d] * 4 + [GroupedBatchNorm] * 2
    assert kinds(made("VGG9 without norm")) == [GroupedNorm] * 2
    assert kinds(made("VGG9 without norm", norm="keep")) == []
    assert kinds(made("ResNet18 with group norm")).count(GroupedNorm) == 7
    assert {m.num_groups for m in made("VGG9").modules() if isinstance(m, GroupedNorm)} == {3}


def test_the_added_norm_follows_its_convolution():
    network = made("VGG9 without norm", depth=5)
    seen: list[torch.Tensor] = []
    for layer in network.body.modules():
        if isinstance(layer, GroupedConv2d | GroupedNorm):
            layer.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0], output]))
    network(images())
    assert seen[1] is seen[2]


@pytest.mark.slow
def test_the_table_of_parameters():
    """Every row of psi's documentation, counted by the tensors of its networks."""
    rows = re.findall(r"^ *(\w+) +(\d+)  +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", psi.__doc__, re.MULTILINE)
    assert len(rows) == 9
    with torch.device("meta"):
        for name, depth, *numbers in rows:
            makers = {"VGG9": lambda: VGG9(norm="batch"), "VGG16": VGG16, "MobileNetV1": MobileNetV1,
                      "ResNet9": ResNet9, "ResNet18": ResNet18}  # fmt: skip
            make = makers.get(name, lambda name=name: TorchvisionModel(name=name))
            plain, dense, grouped = make(), make(), make()
            for network in (plain, dense, grouped):
                network.eval()(torch.zeros(1, 3, 32, 32))
            whole = psi(grouped, 10, int(depth))
            counts = [count(plain), count(psi(dense, 10, int(depth), structure="dense")), count(whole)]
            one = counts[-1] - count(trim(whole, range(9)))
            expected = [*counts, counts[-1] - 10 * one, one]
            assert [int(number.replace(",", "")) for number in numbers] == expected, name


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("make", "depth"), [(VGG9, 4), (VGG16, 9)])
def test_the_default_depth_is_the_papers(make, depth):
    def shapes(depth: int | None) -> dict[str, torch.Size]:
        with torch.device("meta"):
            plain = make().eval()
            plain(torch.zeros(1, 3, 32, 32))
            return {name: tensor.shape for name, tensor in psi(plain, 10, depth).state_dict().items()}

    assert shapes(None) == shapes(depth)
    assert shapes(None) != shapes(depth + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": -1}, "share 0 to 8"), ({"depth": 9}, "share 0 to 8"), ({"boundary": "half"}, "split, full"),
        ({"norm": "batch"}, "group, keep"), ({"structure": "x"}, "grouped, dense"),
    ],
)  # fmt: skip
def test_options_that_are_none(options, words):
    with pytest.raises(ConfigError, match=words):
        made("VGG9", **options)


def test_the_channels_of_an_image_cannot_be_rounded():
    with pytest.raises(ConfigError, match="the 3 channels of an image among 5"):
        psi(VGG16(), 5, depth=0)


def test_a_lazy_layer_has_to_know_its_shape():
    with pytest.raises(ConfigError, match="run a batch"):
        psi(VGG9(), 10)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.PixelShuffle(1)), "PixelShuffle"),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(0)), "Flatten"),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.LayerNorm([6, 30, 30])), "LayerNorm"),
    ],
)
def test_what_mixes_channels_is_refused(body, words):
    with pytest.raises(ConfigError, match=f"channels through {words}"):
        psi(Parts(body, nn.Linear(6, 3)), 3)


@pytest.mark.parametrize("name", ["densenet121", "shufflenet_v2_x0_5", "convnext_tiny", "vit_b_16"])
def test_networks_of_torchvision_that_cannot_be_divided(name):
    options = {"image_size": 32} if name == "vit_b_16" else None
    with pytest.raises(ConfigError, match="model.backbone"):
        psi(TorchvisionModel(name=name, options=options), 10)


def test_a_head_of_another_kind():
    with pytest.raises(ConfigError, match="Sequential"):
        psi(Parts(nn.Sequential(nn.Conv2d(3, 6, 3)), nn.Sequential(nn.Linear(6, 3))), 3)


def with_norms(norm, layer=lambda: nn.Conv2d(8, 10, 3)):
    body = nn.Sequential(nn.Conv2d(3, 7, 3), norm(7), nn.Conv2d(7, 8, 3), norm(8), layer(), nn.AdaptiveAvgPool2d(1))
    return Parts(nn.Sequential(*body, nn.Flatten()), nn.Linear(10, 4))


@pytest.mark.parametrize("structure", ["grouped", "dense"])
@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}], ids=str
)
def test_batch_norms_keep_their_options(options, structure):
    network = psi(with_norms(lambda width: nn.BatchNorm2d(width, **options)), 4, 1, norm="keep", structure=structure)
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    assert [norm.num_features for norm in norms] == [8, 8]
    for norm in norms:
        assert {name: getattr(norm, name) for name in options} == options
        assert (norm.running_mean is None) == (not norm.track_running_stats)
    if structure == "grouped":
        images = torch.rand(2, 3, 9, 9)
        whole = network.eval()(images)
        torch.testing.assert_close(trim(network, [1, 3])(images)[:, [1, 3]], whole[:, [1, 3]])


@pytest.mark.parametrize("norm", ["group", "keep"])
def test_group_norms_without_affine_parameters_stay_so(norm):
    network = psi(with_norms(lambda width: nn.GroupNorm(1, width, affine=False)), 4, 1, norm=norm)
    assert [part.affine for part in network.modules() if isinstance(part, nn.GroupNorm)] == [False, False]


class Standardized(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


@pytest.mark.parametrize("layer", [
    lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 10, 3)), lambda: Standardized(8, 10, 3)
])  # fmt: skip
def test_a_layer_that_is_more_than_its_weight_is_not_divided(layer):
    with pytest.raises(ConfigError, match=r"layer '4' .* which would be lost"):
        psi(with_norms(nn.BatchNorm2d, layer), 4, 1)
