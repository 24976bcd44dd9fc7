"""Layers in G groups of neurons that know nothing of each other, and networks from which groups are cut out.

In every tensor of a grouped layer the rows, dimension 0, are divided among the groups.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError

Mapping = Literal["contiguous"] | list[int]


class Grouped(nn.Module):
    """What all grouped layers share.

    Attributes:
        num_groups: number of groups G of the whole layer.
        kept: the groups that are there, in increasing order.
        row_groups: the group of every row that is there.
    """

    num_groups: int
    kept: list[int]
    row_groups: list[int]

    def _divide(self, num_groups: int, row_groups: Iterable[int]) -> None:
        self.num_groups, self.kept, self.row_groups = num_groups, list(range(num_groups)), list(row_groups)

    @torch.no_grad()
    def trim(self, groups: Iterable[int]) -> None:
        """Cut all groups out but these; those that are gone already stay so. Without any change parameters stay too."""
        wanted = set(groups)
        if wanted >= set(self.kept):
            return
        rows = [row for row, group in enumerate(self.row_groups) if group in wanted]
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(self, name, nn.Parameter(parameter[rows], parameter.requires_grad))
        for name, buffer in list(self.named_buffers(recurse=False)):
            if buffer.dim():
                setattr(self, name, buffer[rows])
        before = len(self.kept)
        self.kept = [group for group in self.kept if group in wanted]
        self.row_groups = [self.row_groups[row] for row in rows]
        self._resize(len(self.kept), before)

    def _resize(self, now: int, before: int) -> None:
        """Note that this many groups are there now, and were before."""


class GroupedConv2d(Grouped, nn.Conv2d):
    """A convolution each of whose G groups of output channels sees its own group of input channels only.

    Args:
        in_channels: channels of the input, a multiple of ``num_groups``.
        out_channels: channels of the output, likewise.
        kernel_size: as in :class:`torch.nn.Conv2d`.
        num_groups: G.
        reads_all: whether every group sees all input channels instead.
        within: number of groups of the convolution inside one group; a depthwise convolution has all its channels.
        kwargs: ``stride``, ``padding``, ``dilation`` and ``bias`` of :class:`torch.nn.Conv2d`.

    Source:
        Psi-Net, Section 3.2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        num_groups: int,
        reads_all: bool = False,
        within: int = 1,
        **kwargs: Any,
    ) -> None:
        groups = 1 if reads_all else num_groups * within
        super().__init__(in_channels, out_channels, kernel_size, groups=groups, **kwargs)
        self.reads_all = reads_all
        self._divide(num_groups, evenly(out_channels, num_groups))

    def _resize(self, now: int, before: int) -> None:
        self.out_channels = len(self.row_groups)
        if not self.reads_all:
            self.in_channels, self.groups = self.in_channels // before * now, self.groups // before * now


class GroupedLinear(Grouped):
    """G fully connected layers side by side, each from its own group of features to its own group of outputs.

    Args:
        in_features: of all groups together, a multiple of ``num_groups``.
        out_features: likewise.
        num_groups: G.
        bias: whether to add a learned bias.
        reads_all: whether every group sees all features instead.

    Attributes:
        weight: (out_features, in_features / G), or (out_features, in_features) where every group sees all.
        bias: (out_features,) or None.

    Source:
        Psi-Net, Section 3.2.
    """

    def __init__(
        self, in_features: int, out_features: int, num_groups: int, bias: bool = True, reads_all: bool = False
    ) -> None:
        super().__init__()
        self.reads_all = reads_all
        self._draw(in_features if reads_all else share(in_features, num_groups), out_features, bias)
        self._divide(num_groups, evenly(out_features, num_groups))

    def _draw(self, inputs: int, outputs: int, bias: bool) -> None:
        bound = 1 / math.sqrt(inputs)  # torch.nn.Linear's
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_features) to (B, out_features)."""
        if self.reads_all:
            return nn.functional.linear(x, self.weight, self.bias)
        groups = len(self.kept)
        weight = self.weight.view(groups, len(self.weight) // groups, -1)
        y = torch.einsum("bgi,goi->bgo", x.view(x.shape[0], groups, -1), weight).flatten(1)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, num_groups={self.num_groups}, kept={len(self.kept)}"


class GroupedLogits(GroupedLinear):
    """A classifier whose logit of a class comes from the features of the class's group only.

    Once groups are cut out, the logits of their classes are minus infinity: they have no part in a softmax, and no
    gradient.

    Args:
        in_features: of all groups together, a multiple of their number.
        class_groups: the group of every class.
        bias: whether to add a learned bias.
        reads_all: whether every logit sees all features instead.

    Attributes:
        weight: (classes, in_features / G), or (classes, in_features) where every logit sees all.

    Source:
        Psi-Net, Section 3.2.
    """

    def __init__(
        self, in_features: int, class_groups: Sequence[int], bias: bool = True, reads_all: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.reads_all = reads_all
        self.num_classes, self.class_groups = len(class_groups), list(class_groups)
        num_groups = max(class_groups) + 1
        self._draw(in_features if reads_all else share(in_features, num_groups), len(class_groups), bias)
        self._divide(num_groups, class_groups)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_features) to (B, classes)."""
        if self.reads_all:
            logits = nn.functional.linear(x, self.weight, self.bias)
        else:
            place = {group: i for i, group in enumerate(self.kept)}
            features = x.view(x.shape[0], len(self.kept), -1)[:, [place[group] for group in self.row_groups]]
            logits = torch.einsum("bcf,cf->bc", features, self.weight)
            logits = logits if self.bias is None else logits + self.bias
        if len(self.kept) == self.num_groups:
            return logits
        known = [c for c, group in enumerate(self.class_groups) if group in self.kept]
        absent = logits.new_full((x.shape[0], self.num_classes), -torch.inf)
        return absent.index_copy(1, torch.tensor(known, device=x.device), logits)


class GroupedNorm(Grouped, nn.GroupNorm):
    """Group norm with the groups of the layer before it: every group is normalized on its own.

    Args:
        num_groups: G.
        num_channels: a multiple of G.
        affine: as in :class:`torch.nn.GroupNorm`.

    Source:
        Psi-Net, Section 3.2.
    """

    def __init__(self, num_groups: int, num_channels: int, affine: bool = True) -> None:
        super().__init__(num_groups, num_channels, affine=affine)
        self._divide(num_groups, evenly(num_channels, num_groups))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, len(self.kept), self.weight, self.bias, self.eps)


class GroupedBatchNorm(Grouped, nn.modules.batchnorm._BatchNorm):
    """Batch norm of (B, C) or (B, C, H, W), whose channels are divided among G groups.

    Args:
        num_groups: G.
        num_features: a multiple of G.
        eps: as in :class:`torch.nn.BatchNorm2d`, like ``momentum``, ``affine`` and ``track_running_stats``.
        momentum: likewise.
        affine: likewise.
        track_running_stats: likewise.
    """

    def __init__(
        self,
        num_groups: int,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._divide(num_groups, evenly(num_features, num_groups))

    def _check_input_dim(self, input: Tensor) -> None:
        """Take features and images."""

    def _resize(self, now: int, before: int) -> None:
        self.num_features = len(self.row_groups)


class GroupSlice(Grouped):
    """Shared channels on their way to grouped layers: each group gets its own slice of them.

    Args:
        num_groups: G, a divisor of the number of channels, or of features.
    """

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self._divide(num_groups, [])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, ...) to the channels of the groups that are there."""
        if len(self.kept) == self.num_groups:
            return x
        return x.unflatten(1, (self.num_groups, -1))[:, self.kept].flatten(1, 2)


def grouped_layers(network: nn.Module) -> Iterator[tuple[str, Grouped]]:
    """Return the grouped layers inside a network, by name."""
    return ((name, layer) for name, layer in network.named_modules() if isinstance(layer, Grouped))


def row_groups(network: nn.Module) -> dict[str, Tensor]:
    """Return the group of every row of every tensor that is divided among groups, by its name in ``state_dict()``."""
    return {
        f"{path}.{name}".lstrip("."): torch.tensor(layer.row_groups)
        for path, layer in grouped_layers(network)
        for name, tensor in layer.state_dict().items()
        if tensor.dim()
    }


def trim(network: nn.Module, groups: Iterable[int]) -> nn.Module:
    """Cut all groups but these out of a network, in place, and return it.

    Its logits for the classes of these groups stay what they were; those of other classes are minus infinity.

    Args:
        network: a network in groups.
        groups: numbers of the groups to keep, from 0.

    Raises:
        ConfigError: when no group would be left, or when there is none of that number.

    Source:
        Psi-Net, Section 4, Eq. 6.
    """
    layers, wanted = [layer for _, layer in grouped_layers(network)], sorted(set(groups))
    there = layers[0].kept if layers else [0]
    if not wanted or not set(wanted) <= set(there):
        raise ConfigError(f"Cannot trim a network to the groups {wanted}: give some of {there}.")
    for layer in layers:
        layer.trim(wanted)
    return network


def class_groups(classes: int, groups: int, mapping: Mapping = "contiguous") -> list[int]:
    """Return the group of every class.

    Args:
        classes: number of classes C.
        groups: number of groups G; with G = C every class has its own.
        mapping: ``contiguous``: class c is of group ``floor(c G / C)``; or the group of every class.

    Raises:
        ConfigError: when a class or a group would be without the other.

    Example:
        >>> class_groups(6, 3)
        [0, 0, 1, 1, 2, 2]
    """
    if not 1 <= groups <= classes:
        raise ConfigError(
            f"model.groups={groups}: a group needs a class; with {classes} classes give 1 to {classes} groups."
        )
    if mapping == "contiguous":
        return [c * groups // classes for c in range(classes)]
    if len(mapping) != classes or set(mapping) != set(range(groups)):
        raise ConfigError(
            f"model.mapping={mapping}: give the group, 0 to {groups - 1}, of each of the {classes} classes, "
            "leaving no group out."
        )
    return list(mapping)


def evenly(width: int, groups: int) -> list[int]:
    """Return the group of every one of ``width`` rows, equally many a group."""
    return [row // share(width, groups) for row in range(width)]


def share(width: int, groups: int) -> int:
    """Return the width of one group.

    Raises:
        ConfigError: when the width is not a multiple of the number of groups.
    """
    if width % groups:
        raise ConfigError(f"A width of {width} cannot be divided among {groups} groups; give a multiple of {groups}.")
    return width // groups
