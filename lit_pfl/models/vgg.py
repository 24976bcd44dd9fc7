"""Networks without skips."""

from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from lit_pfl.models.backbone import Backbone, Norm, norm_maker


class VGG9(Backbone):
    """VGG-9 of FedMA: six 3 x 3 convolutions and three fully connected layers, with biases and dropout.

    With 3 channels, 10 classes, no norm and images of 32 x 32 pixels: 3,491,530 parameters. The body is a flat
    sequence.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels after the first convolution; 32 is the paper's.
        norm: None, as in FedMA; or a norm after each convolution, ``batch`` or ``group`` with two groups.
        init: how weights are drawn: ``torch``: as PyTorch draws them, which without a norm makes signals fade from
            layer to layer, so that it takes hundreds of steps until the network begins to learn; ``he``: so that they
            do not (He et al. 2015).

    Source:
        FedMA (Wang et al. 2020), with the dropout of its released code; the norms of Psi-Net, Fig. 5.
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        width: int = 32,
        norm: Norm | None = None,
        init: Literal["torch", "he"] = "torch",
    ) -> None:
        body = nn.Sequential(
            *_conv(channels, width, norm),
            *_conv(width, 2 * width, norm), nn.MaxPool2d(2),
            *_conv(2 * width, 4 * width, norm),
            *_conv(4 * width, 4 * width, norm), nn.MaxPool2d(2), nn.Dropout2d(0.05),
            *_conv(4 * width, 8 * width, norm),
            *_conv(8 * width, 8 * width, norm), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.1),
            (_HeLazyLinear if init == "he" else nn.LazyLinear)(16 * width), nn.ReLU(),
            nn.Linear(16 * width, 16 * width), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip
        super().__init__(body, nn.Linear(16 * width, classes))
        for layer in self.modules() if init == "he" else ():
            if isinstance(layer, nn.Conv2d | nn.Linear) and not isinstance(layer, nn.LazyLinear):
                _draw_as_he(layer)


class VGG16(Backbone):
    """VGG-16 for small images: thirteen 3 x 3 convolutions with biases in five stages, and one fully connected layer.

    With 3 channels and 10 classes 14,719,818 parameters, of which the convolutions have 14,714,688; batch norm adds
    8,448. Images need 32 pixels or more a side.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels of the first stage; 64 is the paper's.
        norm: a norm after each convolution, ``batch`` or ``group`` with two groups; None for none.

    Source:
        Simonyan and Zisserman 2015, configuration D; Psi-Net, Section 5, which does not say what follows the
        convolutions.
    """

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 64, norm: Norm | None = "batch") -> None:
        layers: list[nn.Module] = []
        inputs = channels
        for factor, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
            for _ in range(convolutions):
                layers += _conv(inputs, factor * width, norm)
                inputs = factor * width
            layers.append(nn.MaxPool2d(2))
        super().__init__(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(8 * width, classes))


def _conv(inputs: int, outputs: int, norm: Norm | None) -> list[nn.Module]:
    norms = [] if norm is None else [norm_maker(norm)(outputs)]
    return [nn.Conv2d(inputs, outputs, 3, padding=1), *norms, nn.ReLU()]


class _HeLazyLinear(nn.LazyLinear):
    """Draws its weights as He et al. do, once it knows its shape; a plain linear layer from then on."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not is_lazy(self.weight) and self.weight.numel():  # its constructor is here too, without a shape
            _draw_as_he(self)


def _draw_as_he(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
