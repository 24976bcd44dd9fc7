"""Grouped layers against loops over groups of plain layers, and what is left of them when groups are cut out."""

import copy

import pytest
import torch
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn import (
    GroupedBatchNorm,
    GroupedConv2d,
    GroupedLinear,
    GroupedLogits,
    GroupedNorm,
    GroupSlice,
    class_groups,
    row_groups,
    trim,
)

KEPT = [0, 2]


def plain(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("within", [1, 2])
def test_a_grouped_convolution_is_one_plain_convolution_a_group(within, bias):
    layer = GroupedConv2d(12, 18, 3, num_groups=3, within=within, bias=bias, stride=2, padding=1)
    x = torch.randn(5, 12, 7, 7)
    loop = []
    for group in range(3):
        weight = layer.weight[6 * group : 6 * group + 6]
        own = nn.Conv2d(4, 6, 3, 2, 1, groups=within, bias=bias)
        own = plain(own, weight, layer.bias[6 * group : 6 * group + 6] if bias else None)
        loop.append(own(x[:, 4 * group : 4 * group + 4]))
    torch.testing.assert_close(layer(x), torch.cat(loop, 1))
    whole = layer(x).unflatten(1, (3, 6))
    trim(layer, KEPT)
    assert layer.weight.shape[0] == layer.out_channels == 12
    assert (layer.in_channels, layer.groups) == (8, 2 * within)
    torch.testing.assert_close(layer(x.unflatten(1, (3, 4))[:, KEPT].flatten(1, 2)), whole[:, KEPT].flatten(1, 2))


def test_a_convolution_whose_groups_read_everything():
    layer = GroupedConv2d(5, 6, 3, num_groups=3, reads_all=True)
    x = torch.randn(2, 5, 7, 7)
    whole = layer(x).unflatten(1, (3, 2))
    trim(layer, KEPT)
    torch.testing.assert_close(layer(x), whole[:, KEPT].flatten(1, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_a_grouped_linear_layer_is_one_plain_layer_a_group(bias):
    layer = GroupedLinear(12, 6, 3, bias)
    x = torch.randn(5, 12)
    loop = []
    for group in range(3):
        rows = slice(2 * group, 2 * group + 2)
        own = plain(nn.Linear(4, 2, bias), layer.weight[rows], layer.bias[rows] if bias else None)
        loop.append(own(x[:, 4 * group : 4 * group + 4]))
    torch.testing.assert_close(layer(x), torch.cat(loop, 1))
    whole = layer(x).unflatten(1, (3, 2))
    trim(layer, KEPT)
    torch.testing.assert_close(layer(x.unflatten(1, (3, 4))[:, KEPT].flatten(1, 2)), whole[:, KEPT].flatten(1, 2))


def test_a_grouped_linear_layer_is_drawn_as_plain_ones_are():
    torch.manual_seed(1)
    layer = GroupedLinear(4000, 100, 10)
    assert layer.weight.shape == (100, 400)
    assert 0.049 < layer.weight.abs().max() <= 0.05  # 1 / sqrt(400)
    assert layer.bias.abs().max() <= 0.05


@pytest.mark.parametrize("mapping", [[0, 1, 2, 0, 1, 2, 2], [2, 2, 2, 0, 1, 1, 2]])
def test_logits_come_from_the_features_of_their_classs_group(mapping):
    head = GroupedLogits(12, mapping)
    x = torch.randn(5, 12)
    loop = [x.unflatten(1, (3, 4))[:, g] @ head.weight[c] + head.bias[c] for c, g in enumerate(mapping)]
    whole = head(x)
    torch.testing.assert_close(whole, torch.stack(loop, 1))
    trim(head, KEPT)
    logits = head(x.unflatten(1, (3, 4))[:, KEPT].flatten(1, 2))
    known = [c for c, group in enumerate(mapping) if group in KEPT]
    assert head.weight.shape == (len(known), 4)
    torch.testing.assert_close(logits[:, known], whole[:, known])
    absent = [c for c in range(7) if c not in known]
    assert torch.equal(logits[:, absent], torch.full((5, len(absent)), -torch.inf))
    nn.functional.cross_entropy(logits, torch.tensor(known)[:1].expand(5)).backward()
    alone = nn.functional.cross_entropy(whole[:, known], torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(nn.functional.cross_entropy(logits, torch.tensor(known)[:1].expand(5)), alone)
    assert all(p.grad.isfinite().all() for p in head.parameters())


def test_group_norm_normalises_every_group_by_itself():
    norm = GroupedNorm(3, 6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
        norm.bias.copy_(torch.randn(6))
    x = torch.randn(4, 6, 5, 5)
    parts = []
    for group in range(3):
        rows = slice(2 * group, 2 * group + 2)
        own = plain(nn.GroupNorm(1, 2), norm.weight[rows], norm.bias[rows])
        parts.append(own(x[:, rows]))
    torch.testing.assert_close(norm(x), torch.cat(parts, 1))
    trim(norm, KEPT)
    torch.testing.assert_close(norm(x[:, [0, 1, 4, 5]]), torch.cat([parts[0], parts[2]], 1))


def test_batch_norm_keeps_the_statistics_of_what_is_left():
    norm, same = GroupedBatchNorm(3, 6), nn.BatchNorm2d(6)
    x = torch.randn(4, 6, 5, 5) * 3 + 1
    torch.testing.assert_close(norm(x), same(x))
    trim(norm.eval(), KEPT)
    torch.testing.assert_close(norm(x[:, [0, 1, 4, 5]]), same.eval()(x)[:, [0, 1, 4, 5]])
    assert norm.running_mean.shape == (4,)


def test_a_slice_hands_on_what_is_left():
    x = torch.randn(2, 6, 3, 3)
    assert GroupSlice(3)(x) is x
    assert torch.equal(trim(GroupSlice(3), KEPT)(x), x[:, [0, 1, 4, 5]])
    assert torch.equal(trim(GroupSlice(3), [1])(x.flatten(1)), x[:, [2, 3]].flatten(1))


def test_trimmed_twice_is_trimmed_to_what_both_leave():
    whole = nn.Sequential(GroupedLinear(12, 6, 3), GroupedNorm(3, 6), GroupedLogits(6, [0, 1, 2]))
    once = trim(copy.deepcopy(whole), [1])
    twice = trim(trim(copy.deepcopy(whole), [1, 2]), [1])
    x = torch.randn(2, 4)
    assert torch.equal(once(x), twice(x))


def test_trimmed_to_what_is_there_nothing_changes():
    layer = trim(GroupedLinear(12, 6, 3), KEPT)
    weight = layer.weight
    assert trim(layer, KEPT).weight is weight  # an optimizer may hold it


def test_every_row_says_its_group():
    network = nn.Sequential(
        nn.Linear(4, 4), GroupedLinear(4, 6, 2), GroupedBatchNorm(2, 6), GroupedLogits(6, [1, 0, 1])
    )
    half = [0, 0, 0, 1, 1, 1]
    assert {name: groups.tolist() for name, groups in row_groups(network).items()} == {
        "1.weight": half, "1.bias": half, "2.weight": half, "2.bias": half, "2.running_mean": half,
        "2.running_var": half, "3.weight": [1, 0, 1], "3.bias": [1, 0, 1],
    }  # fmt: skip
    trim(network, [1])
    assert row_groups(network)["1.weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("groups", [[], [3], [0, 5]])
def test_groups_that_are_not_there_cannot_be_left(groups):
    with pytest.raises(ConfigError, match=r"give some of \[0, 1, 2\]"):
        trim(GroupedLinear(6, 6, 3), groups)


def test_classes_share_groups_in_equal_parts():
    assert class_groups(10, 10) == list(range(10))
    assert [class_groups(100, 20).count(group) for group in range(20)] == [5] * 20
    assert class_groups(7, 3) == [0, 0, 0, 1, 1, 2, 2]
    assert class_groups(4, 2, [1, 0, 0, 1]) == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("groups", "mapping", "words"),
    [
        (0, "contiguous", "1 to 4"), (5, "contiguous", "1 to 4"), (2, [0, 1, 0], "each of the 4"),
        (2, [0, 0, 0, 0], "leaving no group out"), (2, [0, 1, 2, 0], "0 to 1"), (2, "other", "0 to 1"),
    ],
)  # fmt: skip
def test_classes_and_groups_that_do_not_go_together(groups, mapping, words):
    with pytest.raises(ConfigError, match=words):
        class_groups(4, groups, mapping)


def test_widths_that_cannot_be_divided():
    for make in (lambda: GroupedLinear(7, 6, 3), lambda: GroupedLinear(6, 7, 3), lambda: GroupedLogits(7, [0, 1, 2])):
        with pytest.raises(ConfigError, match="A width of 7"):
            make()
