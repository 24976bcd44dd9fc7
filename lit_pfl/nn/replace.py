"""Putting other layers in place of a network's own."""

from collections.abc import Callable

from torch import nn
from torch.nn.parameter import is_lazy

from lit_pfl.errors import ConfigError


def replace_layers(
    module: nn.Module,
    make: Callable[[nn.Conv2d | nn.Linear], nn.Module],
    keep: Callable[[str], bool] = lambda path: False,
) -> nn.Module:
    """Replace every ``Conv2d`` and ``Linear`` inside a module, in place.

    Args:
        module: any network.
        make: returns the new layer for an old one; type, device and training mode are then made alike.
        keep: says of a layer's path whether it stays as it is.

    Returns:
        The same network; or the new layer, if ``module`` is such a layer itself. A layer in two places stays one.

    Raises:
        ConfigError: for a convolution that pads with anything but zeros, or a lazy layer without its shape.
    """
    made: dict[nn.Module, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.Conv2d | nn.Linear) or keep(path):
            continue
        if is_lazy(layer.weight):
            raise ConfigError(f"Layer {path!r} does not know its shape yet: run a batch through the network first.")
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            raise ConfigError(f"Layer {path!r} has padding_mode={layer.padding_mode!r}; only 'zeros' can be replaced.")
        if layer not in made:
            made[layer] = make(layer).to(layer.weight).train(layer.training)
        if not path:
            return made[layer]
        module.set_submodule(path, made[layer])
    return module
