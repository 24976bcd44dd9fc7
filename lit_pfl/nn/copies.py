"""Copies of trained parts of a network, which no gradient trains: momentum encoders, teachers, moving averages."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lit_pfl.nn.composed import is_dense


class Copy(NamedTuple):
    """A part of a network that is built like a trained one, and is not trained.

    Attributes:
        path: where the copy is.
        original: where the trained part is.
        layers: the convolutions and linear layers of the copy, by their paths in the network, each with the
            layer that it is a copy of.
        equal: whether the values of these layers are those of the trained ones.
    """

    path: str
    original: str
    layers: Mapping[str, tuple[nn.Module, nn.Module]]
    equal: bool


def copies_in(module: nn.Module) -> list[Copy]:
    """Return the parts of a network that are copies of trained ones, the largest such parts.

    A part is a copy when it has no weight that is trained, and one trained part has the same classes inside, under the
    same names, with parameters of the same shapes. If several have, the only one with the same values counts. Numbered
    parts of one list (``layers.0`` and ``layers.1``) are no copies of each other, and neither are two single layers
    with different values: networks of equal layers, some of them frozen, are common.

    What a module of nothing else holds (PyTorch's ``AveragedModel``, timm's ``ModelEmaV3``) need not be frozen, where
    it is of several layers, with the values of a part that nothing holds so.

    Args:
        module: the network.
    """
    parts = {path: part for path, part in module.named_modules() if path and next(_layers(part), None)}
    frozen = {path for path, part in parts.items() if not any(p.requires_grad for p in part.parameters())}
    held = {path for path in parts if "." in path and _is_held(module.get_submodule(path.rpartition(".")[0]))}
    if not frozen | held:
        return []
    trained = defaultdict(list)
    for path, part in parts.items():
        if any(layer.weight.requires_grad for _, layer in _layers(part)):
            trained[_structure(part)].append(path)
    found: list[Copy] = []
    for path in [path for path in parts if path in frozen | held]:
        if any(path.startswith(f"{copy.path}.") for copy in found):
            continue
        alike = [original for original in trained[_structure(parts[path])] if _by_attribute(path, original)]
        copies = [_copy(path, original, parts) for original in alike if path in frozen or original not in held]
        copies = [copy for copy in copies if copy.equal] or copies
        if len(copies) == 1 and _is_sure(copies[0], path in frozen):
            found += copies
    return found


def _is_sure(copy: Copy, frozen: bool) -> bool:
    several = len(copy.layers) > 1
    return copy.equal or several if frozen else copy.equal and several


def _is_held(parent: nn.Module) -> bool:
    """Say whether a module has one part, and no weight of its own."""
    return len(parent._modules) == 1 and not parent._parameters


def _layers(part: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.Linear]]:
    for path, layer in part.named_modules():
        if is_dense(layer) and not is_lazy(layer.weight):
            yield path, layer


def _structure(part: nn.Module) -> Hashable:
    """Return what two parts have in common when one is a copy of the other: classes, names and shapes."""
    classes = tuple((path, type(inside)) for path, inside in part.named_modules(remove_duplicate=False))
    return classes, tuple((name, tensor.shape) for name, tensor in part.named_parameters(remove_duplicate=False))


def _by_attribute(path: str, other: str) -> bool:
    """Say whether two paths part at names, and not at numbers in a list."""
    steps = zip(path.split("."), other.split("."), strict=False)
    return next((not (a.isdigit() and b.isdigit()) for a, b in steps if a != b), True)


def _copy(path: str, original: str, parts: dict[str, nn.Module]) -> Copy:
    inside = dict(_layers(parts[original]))
    layers = {f"{path}.{name}".rstrip("."): (layer, inside[name]) for name, layer in _layers(parts[path])}
    return Copy(path, original, layers, all(map(_same_values, *zip(*layers.values(), strict=True))))


def _same_values(layer: nn.Module, other: nn.Module) -> bool:
    pairs = zip(layer.parameters(), other.parameters(), strict=True)
    return all(p.is_meta or torch.equal(p, q.to(p)) for p, q in pairs)
