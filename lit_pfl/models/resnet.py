"""Residual networks."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from lit_pfl.errors import ConfigError
from lit_pfl.models.backbone import Backbone, Norm, norm_maker

Stem = Literal["small", "large"]

#: from channels and width to the layers before the first block, all but norm and ReLU; and what follows those two
_STEMS: dict[str, tuple[Callable[[int, int], nn.Conv2d], list[nn.Module]]] = {
    "small": (lambda channels, width: nn.Conv2d(channels, width, 3, 1, 1, bias=False), []),
    "large": (lambda channels, width: nn.Conv2d(channels, width, 7, 2, 3, bias=False), [nn.MaxPool2d(3, 2, 1)]),
}


class ResNet9(Backbone):
    """ResNet-9 of SimFed and Factorized-FL.

    Eight convolutions without bias, each with batch norm and ReLU, a skip around the third and fourth and around the
    sixth and seventh. With 3 channels, width 64 and 10 classes: 2,571,338 parameters.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels after the first convolution; 64 is the papers'.
        fc_layers: fully connected layers: 1, the classifier; or 2, with a hidden one before it, as wide as the features
            and part of the body.
        fc_norm: whether the hidden layer has batch norm.

    Raises:
        ConfigError: for another number of layers, or a norm of a hidden layer that is not there.

    Source:
        Factorized-FL, Table 3, with what its released code adds (batch norm, no padding in the last convolution);
        the heads of Fig. 8(h).
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, width: int = 64, fc_layers: int = 1, fc_norm: bool = False
    ) -> None:
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
            *_hidden_layers(4 * width, fc_layers, fc_norm),
        )
        super().__init__(body, nn.Linear(4 * width, classes))


class Residual(nn.Sequential):
    """Layers with a skip around them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x + layers(x)."""
        return x + super().forward(x)


class ResNet18(Backbone):
    """ResNet-18 for small images: eight basic blocks of 64, 128, 256 and 512 channels, 512 features.

    With 3 channels, 10 classes, group norm and no bias 11,173,952 parameters, as FedSLR counts them.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        width: channels of the first blocks; 64 is the papers'.
        norm: ``batch`` (Factorized-FL), or ``group`` with two groups (FedSLR).
        fc_layers: see :class:`ResNet9`.
        fc_norm: see :class:`ResNet9`.
        bias: whether fully connected layers have a bias; FedSLR's for CIFAR have none.
        stem: ``small``, a 3 x 3 convolution, for images of 32 pixels; ``large``, the original one, 7 x 7 with stride 2
            and a max-pool, as FedSLR has it for Tiny-ImageNet.

    Raises:
        ConfigError: for a norm, a stem or a number of layers that there is not.

    Source:
        He et al. 2016; Factorized-FL, Fig. 8(h); FedSLR, Table 2 (by its numbers of parameters).
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        width: int = 64,
        norm: Norm = "batch",
        fc_layers: int = 1,
        fc_norm: bool = False,
        bias: bool = True,
        stem: Stem = "small",
    ) -> None:
        if stem not in _STEMS:
            raise ConfigError(f"model.backbone.stem={stem!r}: choose one of {', '.join(_STEMS)}.")
        make_norm, (make_conv, pool) = norm_maker(norm), _STEMS[stem]
        widths = [width * 2**stage for stage in (0, 0, 1, 1, 2, 2, 3, 3)]
        body = nn.Sequential(
            make_conv(channels, width), make_norm(width), nn.ReLU(), *pool,
            *(BasicBlock(*ends, make_norm) for ends in zip([width, *widths[:-1]], widths, strict=True)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            *_hidden_layers(8 * width, fc_layers, fc_norm, bias),
        )  # fmt: skip
        super().__init__(body, nn.Linear(8 * width, classes, bias))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip around them; where it widens, it halves the image's sides.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        make_norm: makes a normalization layer from its number of channels.
    """

    def __init__(self, inputs: int, outputs: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), make_norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), make_norm(outputs),
        )  # fmt: skip
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), make_norm(outputs)] if stride > 1 else []
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W), or half of H and W."""
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def _hidden_layers(width: int, fc_layers: int, fc_norm: bool, bias: bool = True) -> list[nn.Module]:
    """Return the fully connected layers before the classifier (Factorized-FL, Fig. 8(h), which gives no width)."""
    if fc_layers not in (1, 2):
        raise ConfigError(f"model.backbone.fc_layers={fc_layers}: choose 1, the classifier, or 2, a layer before it.")
    if fc_norm and fc_layers == 1:
        raise ConfigError("model.backbone.fc_norm=true is for the hidden layer that model.backbone.fc_layers=2 adds.")
    norm = [nn.BatchNorm1d(width)] if fc_norm else []
    return [nn.Linear(width, width, bias), *norm, nn.ReLU()] if fc_layers == 2 else []
