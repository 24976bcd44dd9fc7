"""Putting other layers in place of a network's own."""

from collections import Counter
from collections.abc import Callable

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lit_pfl.errors import ConfigError


def replace_layers(
    module: nn.Module,
    make: Callable[[nn.Conv2d | nn.Linear], nn.Module],
    keep: Callable[[str], bool] = lambda path: False,
) -> nn.Module:
    """Replace every ``Conv2d`` and ``Linear`` inside a module, in place; frozen and empty ones stay as they are.

    Args:
        module: any network.
        make: returns the new layer for an old one; type, device and training mode are then made alike.
        keep: says of a layer's path whether it stays as it is.

    Returns:
        The same network; or the new layer, if ``module`` is such a layer itself. A layer in two places stays one.

    Raises:
        ConfigError: for a convolution that pads with anything but zeros, a lazy layer without its shape, and a layer
            that is more than its weight, which would be lost without a word.
    """
    made: dict[nn.Module, nn.Module] = {}
    places = places_of_weights(module)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.Conv2d | nn.Linear) or keep(path):
            continue
        if is_lazy(layer.weight):
            raise ConfigError(f"Layer {path!r} does not know its shape yet: run a batch through the network first.")
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            raise ConfigError(f"Layer {path!r} has padding_mode={layer.padding_mode!r}; only 'zeros' can be replaced.")
        if layer.weight.numel() == 0 or not layer.weight.requires_grad:
            continue
        check_plain(layer, path, places)
        if layer not in made:
            made[layer] = make(layer).to(layer.weight).train(layer.training)
        if not path:
            return made[layer]
        module.set_submodule(path, made[layer])
    return module


def places_of_weights(module: nn.Module) -> Counter[int]:
    """Return in how many places of a module each of its parameters is, by its identity."""
    return Counter(id(weight) for part in module.modules() for weight in part._parameters.values())


def check_plain(layer: nn.Conv2d | nn.Linear, path: str, places: Counter[int]) -> None:
    """Refuse to replace a layer that is more than its weight, which would be lost without a word.

    Args:
        layer: the layer.
        path: where it is, for the message.
        places: see :func:`places_of_weights`, of the network that it is in.

    Raises:
        ConfigError: when it does what does not follow from its weight, bias and geometry.
    """
    if more := _beside_its_weight(layer, path, places):
        raise ConfigError(f"Layer {path!r} {more}, which would be lost; only plain layers can be replaced.")


def _beside_its_weight(layer: nn.Conv2d | nn.Linear, path: str, places: Counter[int]) -> str | None:
    """Return what a layer does that does not follow from its weight, bias and geometry."""
    kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    if is_parametrized(layer):
        return "computes its weight by a parametrization (weight_norm, spectral_norm, ...)"
    if layer._forward_pre_hooks or layer._forward_hooks:
        return "has forward hooks"
    if any(getattr(type(layer), name, None) is not getattr(kind, name, None) for name in ("forward", "_conv_forward")):
        return f"computes something of its own as a {type(layer).__name__}"
    if places[id(layer.weight)] > 1:
        return "shares its weight with another one (tied weights)"
    if path.rpartition(".")[2] == "_orig_mod":
        return "is compiled by itself"
    return None
