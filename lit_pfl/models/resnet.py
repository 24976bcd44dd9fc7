"""Residual networks."""

from torch import Tensor, nn

from lit_pfl.models.backbone import Backbone


class ResNet9(Backbone):
    """ResNet-9 of SimFed and Factorized-FL.

    Eight convolutions without bias, each with batch norm and ReLU, a skip around the third and fourth and around the
    sixth and seventh. With 3 channels, width 64 and 10 classes: 2,571,338 parameters.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels after the first convolution; 64 is the papers'.

    Source:
        Factorized-FL, Table 3, with what its released code adds (batch norm, no padding in the last convolution).
    """

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 64) -> None:
        body = nn.Sequential(
            _conv(channels, width),
            _conv(width, 2 * width, kernel_size=5, stride=2, padding=2),
            Residual(_conv(2 * width, 2 * width), _conv(2 * width, 2 * width)),
            _conv(2 * width, 4 * width),
            nn.MaxPool2d(2),
            Residual(_conv(4 * width, 4 * width), _conv(4 * width, 4 * width)),
            _conv(4 * width, 4 * width, padding=0),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        super().__init__(body, nn.Linear(4 * width, classes))


class Residual(nn.Sequential):
    """Layers with a skip around them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x + layers(x)."""
        return x + super().forward(x)


def _conv(inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )
