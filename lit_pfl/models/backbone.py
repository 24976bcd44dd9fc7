"""What every model here is: a body that embeds, a head that classifies."""

from torch import Tensor, nn


class Backbone(nn.Module):
    """A network in two parts.

    Args:
        body: maps (B, C, H, W) images to (B, d) features.
        head: maps (B, d) features to (B, classes) logits.
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to (B, classes) logits."""
        return self.head(self.body(images))
