"""What every model here is: a body that embeds, a head that classifies; and the norms that it can be made with."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from lit_pfl.errors import ConfigError


class Backbone(nn.Module, ABC):
    """A network in two parts. A subclass makes them, from the number of image channels and of classes.

    Args:
        body: maps (B, C, H, W) images to (B, d) features.
        head: maps (B, d) features to (B, classes) logits.
    """

    @abstractmethod
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to (B, classes) logits; whole numbers, as bytes, are divided by 255."""
        # as numbers of 32 bits first, since PyTorch 2.6 exports no division of bytes
        return self.head(self.body(images if images.is_floating_point() else images.float() / 255))


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
