"""Any classifier of torchvision."""

import difflib
from typing import Any

import torchvision
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.models.backbone import Backbone


class TorchvisionModel(Backbone):
    """A classification network of torchvision, untrained, cut before its last fully connected layer.

    Most take images of 32 x 32 pixels or more; see torchvision's documentation.

    Args:
        channels: channels of the input images; where the network takes another number, its first convolution is
            resampled.
        classes: number of classes.
        name: the network's name in torchvision, for example ``resnet18``, ``mobilenet_v3_small`` or ``vgg11``.
        options: further arguments of the network, for example ``{"image_size": 32}`` for ``vit_b_16``.

    Raises:
        ConfigError: for a name that torchvision does not have, options that the network does not take, and networks
            that do not end in one fully connected layer.

    Example:
        >>> model = TorchvisionModel(channels=1, classes=7, name="resnet18")
        >>> model.head
        Linear(in_features=512, out_features=7, bias=True)
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, name: str = "resnet18", options: dict[str, Any] | None = None
    ) -> None:
        names = torchvision.models.list_models(module=torchvision.models)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=5) or names
            raise ConfigError(f"model.backbone.name: torchvision has no {name!r}; choose one of {', '.join(near)}.")
        try:
            network = torchvision.models.get_model(name, num_classes=classes, **(options or {}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model.backbone.options={options} do not suit {name}: {error}") from None
        if getattr(network, "aux_logits", False):
            raise ConfigError(f"{name} has auxiliary classifiers; set model.backbone.options.aux_logits=false.")
        linear = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        if not linear:
            raise ConfigError(f"model.backbone.name={name} does not end in a fully connected layer; choose another.")
        first = next(layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
        if first.in_channels != channels:
            first.in_channels = channels
            first.weight = nn.Parameter(first.weight.new_empty(first.out_channels, channels, *first.kernel_size))
            first.reset_parameters()
        head = network.get_submodule(linear[-1])
        network.set_submodule(linear[-1], nn.Identity())
        super().__init__(network, head)
