"""Layers whose weight is computed from other parameters, used as PyTorch's own are."""

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor, nn


class ComposedLinear(nn.Linear):
    """A fully connected layer whose kind says what ``weight``, (out, in), is.

    It is an ``nn.Linear`` because some networks test for that type in ``forward``, to give them further inputs.

    Attributes:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: (out,) or None.
    """

    weight: Any
    bias: nn.Parameter | None  # type: ignore[assignment]
    in_features: int
    out_features: int

    def __init__(self) -> None:
        nn.Module.__init__(self)  # without the parameter that an nn.Linear makes

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return nn.functional.linear(x, self.weight, self.bias)


class ComposedConv2d(nn.Module):
    """A convolution whose kind says what ``weight``, (O, I, F, F), is.

    Attributes:
        weight_shape: of the weight; with groups, I is the number of input channels of one group.
        stride: as in :class:`torch.nn.Conv2d`, like ``padding``, ``dilation`` and ``groups``.
        bias: (O,) or None.
    """

    weight: Any
    bias: nn.Parameter | None
    weight_shape: tuple[int, ...]
    stride: int | tuple[int, int]
    padding: str | int | tuple[int, int]
    dilation: int | tuple[int, int]
    groups: int

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, I, H, W) to (B, O, H', W')."""
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def composed_layers(module: nn.Module) -> Iterator[tuple[str, ComposedLinear | ComposedConv2d]]:
    """Return the composed layers of a module, with their names; one in two places has two."""
    parts = module.named_modules(remove_duplicate=False)
    return ((name, part) for name, part in parts if isinstance(part, ComposedLinear | ComposedConv2d))


def is_dense(layer: nn.Module) -> TypeGuard[nn.Conv2d | nn.Linear]:
    """Say whether a layer is one of PyTorch's own, or of a class derived from it, with a weight to replace."""
    return isinstance(layer, nn.Conv2d | nn.Linear) and not isinstance(layer, ComposedLinear)


def geometry(layer: nn.Conv2d | ComposedConv2d) -> dict[str, Any]:
    """Return how a convolution moves over its input, by the names of :class:`torch.nn.Conv2d`'s arguments."""
    return {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
