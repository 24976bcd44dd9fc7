"""What every model here is: a body that embeds, a head that classifies."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


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
        """Map (B, C, H, W) images to (B, classes) logits."""
        return self.head(self.body(images))
