"""Sparse weights: how dense every layer is, and which of its weights are active."""

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor
from torch.nn.functional import softshrink


def erk_densities(shapes: Mapping[str, torch.Size], density: float, dense: Set[str] = frozenset()) -> dict[str, float]:
    """Return the Erdos-Renyi-kernel densities of layers.

    A layer's share of active weights is proportional to ``sum(shape) / prod(shape)``, so that large layers are sparser.
    A layer that would exceed 1 is dense, and so that all together have their density, the others are that much sparser.

    Args:
        shapes: the shape of every layer's weight.
        density: share of active weights in all layers together, above 0 and up to 1.
        dense: names of those that are dense whatever their shape.

    Returns:
        Every layer's density, by name.

    Raises:
        ValueError: when the dense ones alone are more than the density allows for.

    Source:
        Evci et al. 2020 (RigL), Section 3; used by FedSpa.
    """
    total = sum(shape.numel() for shape in shapes.values())
    dense = dense | {name for name, shape in shapes.items() if not shape.numel()}  # which no share can be taken of
    fixed = sum(shapes[name].numel() for name in dense)
    if fixed >= density * total and fixed < total:
        raise ValueError(f"{fixed} of {total} weights are dense, which is not below a density of {density}.")
    while sparse := {name: shape for name, shape in shapes.items() if name not in dense}:
        budget = density * total - sum(shapes[name].numel() for name in dense)
        scale = budget / sum(sum(shape) for shape in sparse.values())
        densities = {name: scale * sum(shape) / shape.numel() for name, shape in sparse.items()}
        exceeding = {name for name, share in densities.items() if share > 1}
        if not exceeding:
            return {name: densities.get(name, 1.0) for name in shapes}
        dense = dense | exceeding
    return dict.fromkeys(shapes, 1.0)


def random_mask(shape: torch.Size, active: int, generator: torch.Generator) -> Tensor:
    """Return a bool tensor with some entries set, drawn at random.

    Args:
        shape: of the tensor.
        active: how many entries are set.
        generator: draws them.
    """
    mask = torch.zeros(shape.numel(), dtype=torch.bool)
    mask[torch.randperm(len(mask), generator=generator)[:active]] = True
    return mask.view(shape)


def prune_and_regrow(weight: Tensor, mask: Tensor, scores: Tensor, count: int) -> Tensor:
    """Exchange active weights: drop those that are smallest in size, then take those of the highest scores.

    Args:
        weight: the weights, of any shape.
        mask: bool, of the same shape.
        scores: of the weights' shape; those of active weights do not matter, but what was just dropped may return.
        count: how many to exchange, at most the number of active weights.

    Returns:
        A new mask with as many active weights.
    """
    kept = mask.flatten().clone()
    sizes = weight.detach().abs().flatten().masked_fill(~kept, torch.inf)
    kept[sizes.argsort(stable=True)[:count]] = False
    candidates = scores.flatten().masked_fill(kept, -torch.inf)
    kept[candidates.argsort(descending=True, stable=True)[:count]] = True
    return kept.view(mask.shape)


def pack_bits(masks: Iterable[Tensor]) -> Tensor:
    """Return bool tensors, one after another, as uint8 of 8 entries each, the first in the highest bit."""
    bits = torch.cat([mask.flatten() for mask in masks]).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << _shifts(bits.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the bool tensors of these shapes that :meth:`pack_bits` packed in this order."""
    bits = ((packed[:, None] >> _shifts(packed.device)) & 1).bool().flatten()
    sizes = [shape.numel() for shape in shapes.values()]
    parts = bits[: sum(sizes)].split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def soft_threshold(x: Tensor, threshold: float) -> Tensor:
    """Return ``sign(x) max(|x| - threshold, 0)``, the proximal operator of ``threshold * ||x||_1``.

    Zeros are +0: a -0.0 would be sent.
    """
    return softshrink(x, threshold) + 0.0
