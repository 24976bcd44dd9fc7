"""Following the channels of images through a network: which tensors have as many as which others."""

import math

from torch import fx, nn
from torchvision.ops import StochasticDepth

from lit_pfl.errors import ConfigError
from lit_pfl.nn import CHANNELWISE

LAYERS = (nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
#: functions and methods by name: those that join the channels of all that they are given, and those that keep them
_JOIN = {"add", "iadd", "mul", "imul", "add_", "mul_"}
_KEEP = {
    "relu", "relu_", "relu6", "leaky_relu", "elu", "gelu", "silu", "hardswish", "hardsigmoid", "tanh", "sigmoid",
    "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "boolean_dispatch", "flatten", "mean",
    "contiguous",
}  # fmt: skip


class Channels:
    """The channels of tensors that must have equally many of them: a union-find set.

    Args:
        width: how many there are; 0 for images before a layer has said it.
        fixed: whether the width must stay as it is.
    """

    def __init__(self, width: int, fixed: bool = False) -> None:
        self.width, self.fixed = width, fixed
        self.multiple = 1
        self.parent: Channels | None = None

    def root(self) -> "Channels":
        """Return the set's representative, which knows what holds for all of it."""
        return self if self.parent is None else self.parent.root()

    def join(self, other: "Channels") -> None:
        """Make both sets one.

        Raises:
            ConfigError: when they have different widths.
        """
        one, other = self.root(), other.root()
        if one is other:
            return
        if one.width != other.width:
            raise ConfigError(f"model.backbone adds {other.width} channels to {one.width}; groups cannot be followed.")
        one.fixed |= other.fixed
        one.multiple = math.lcm(one.multiple, other.multiple)
        other.parent = one

    def need(self, multiple: int) -> None:
        """Ask for a multiple of a number of channels."""
        root = self.root()
        root.multiple = math.lcm(root.multiple, multiple)

    def rounded(self) -> int:
        """Return the new width: the nearest multiple, at least one."""
        root = self.root()
        if root.fixed and root.width % root.multiple:
            raise ConfigError(
                f"model.depth=0 divides the {root.width} channels of an image among {root.multiple} groups; "
                "give model.depth=1 or more, or model.boundary=full."
            )
        return max(1, math.floor(root.width / root.multiple + 0.5)) * root.multiple


class Tracer(fx.Tracer):
    """Records how a network's layers follow one another."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into modules that have others inside; what a single one does in training is its own affair."""
        alone = not list(m.children()) and not isinstance(m, nn.Sequential)
        return alone or super().is_leaf_module(m, module_qualified_name)


def check(node: fx.Node, module: nn.Module | None) -> None:
    """Refuse what would mix channels.

    Args:
        node: of a network's graph; anything but a layer.
        module: what it calls, if it calls a module.

    Raises:
        ConfigError: when it is not known to leave every channel to itself.
    """
    if module is not None:
        what = type(module).__name__
        known = isinstance(module, (*NORMS, *CHANNELWISE, StochasticDepth))
    else:
        what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        known = node.op in ("call_function", "call_method") and what in _JOIN | _KEEP
    if not (known and _keeps_channels_apart(what, module, node)):
        raise ConfigError(
            f"model.backbone: Psi-Net cannot follow channels through {what} ({node.name}); use VGG9, VGG16, "
            "MobileNetV1, ResNet9, ResNet18 or another network of convolutions, norms, additions and products."
        )


def _keeps_channels_apart(what: str, module: nn.Module | None, node: fx.Node) -> bool:
    """Say whether a flattening begins, and a mean stays, behind the channels."""
    argument = [*node.args[1:2], *node.kwargs.values()][:1]
    if what == "mean":
        return bool(argument) and isinstance(argument[0], list | tuple) and 1 not in argument[0]
    if what == "flatten":
        return argument == [1]
    return not isinstance(module, nn.Flatten) or module.start_dim == 1
