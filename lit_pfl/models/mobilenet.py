"""Networks of depthwise and pointwise convolutions."""

from torch import nn

from lit_pfl.models.backbone import Backbone, Norm, norm_maker


class MobileNetV1(Backbone):
    """MobileNet for small images: a convolution, and 13 pairs of a depthwise and a pointwise one, without biases.

    With 3 channels, 10 classes and batch norm 3,217,226 parameters. The image is halved four times.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels after the first convolution; 32 is the paper's.
        norm: ``batch``, or ``group`` with two groups.

    Source:
        Howard et al. 2017, Table 1, with stride 1 in the first convolution,
        as is usual for images of 32 pixels; Psi-Net, Section 5.
    """

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 32, norm: Norm = "batch") -> None:
        pairs = [(2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1)]
        make_norm = norm_maker(norm)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3, padding=1, bias=False), make_norm(width), nn.ReLU(),
        ]  # fmt: skip
        inputs = width
        for factor, stride in pairs:
            outputs = factor * width
            layers += [
                nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), make_norm(inputs), nn.ReLU(),
                nn.Conv2d(inputs, outputs, 1, bias=False), make_norm(outputs), nn.ReLU(),
            ]  # fmt: skip
            inputs = outputs
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(body, nn.Linear(inputs, classes))
