"""The norms that models can be made with."""

from collections.abc import Callable
from typing import Literal

from torch import nn

from lit_pfl.errors import ConfigError

Norm = Literal["batch", "group"]

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
}


def norm_maker(norm: str) -> Callable[[int], nn.Module]:
    """Return what makes a norm of a name from its number of channels: ``batch``, or ``group`` with two groups.

    Raises:
        ConfigError: for a name that there is not.
    """
    if norm not in _NORMS:
        raise ConfigError(f"model.backbone.norm={norm!r}: choose one of {', '.join(_NORMS)}.")
    return _NORMS[norm]
