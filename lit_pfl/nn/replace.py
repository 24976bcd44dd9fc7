"""Putting other layers instead of a network's own."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lit_pfl.errors import ConfigError
from lit_pfl.nn.composed import is_dense
from lit_pfl.nn.copies import Copy, copies_in

#: types that may stand between two layers when channels are followed, permuted or divided into groups
CHANNELWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Tanh, nn.Sigmoid,
    nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d,
)  # fmt: skip

#: attributes of every module that are looked through as its tensors and parts
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def replace_layers(
    module: nn.Module,
    make: Callable[[nn.Conv2d | nn.Linear], nn.Module],
    keep: Callable[[str], bool] = lambda path: False,
    load: Callable[[nn.Module, nn.Module], None] | None = None,
) -> nn.Module:
    """Replace every ``Conv2d`` and ``Linear`` inside a module, in place; frozen and empty ones stay as they are.

    A copy of a trained part, such as a momentum encoder, is replaced as its original is, so that the two continue
    having the same parameters in the same order. If it is frozen, it stays so.

    Args:
        module: any network.
        make: returns the new layer for an old one; type, device and training mode are then made equal.
        keep: says of a layer's path whether it stays as it is.
        load: gives a new layer the weight and the bias of an old one, for copies that have other values than
            their originals. Without it these stay as they are, and so do their originals.

    Returns:
        The same network; or the new layer, if ``module`` is such a layer itself. A layer in two places stays one.

    Raises:
        ConfigError: for a convolution that pads with anything but zeros, a lazy layer without its shape, a layer that
            is more than its weight, which would be lost without a word, and copies of weights outside of modules.
    """
    _refuse_kept_copies(module)
    made: dict[nn.Module, nn.Module] = {}
    places = places_of_weights(module)
    copies = copies_in(module)
    stay = _left_alone(copies, load is not None)
    follow = {layer for copy in copies for layer, _ in copy.layers.values()}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if not is_dense(layer) or keep(path) or layer in stay | follow:
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
    for copy in copies:
        for path, (layer, original) in copy.layers.items():
            if original in made:
                check_plain(layer, path, places)  # type: ignore[arg-type]
                made[layer] = _copied(made[original], layer, None if copy.equal else load)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if layer in made:
            module.set_submodule(path, made[layer])
    return module


def _refuse_kept_copies(module: nn.Module) -> None:
    """See that no plain object in a network has copies of its weights, as diffusers' ``EMAModel`` has."""
    shapes = {_shapes(part.parameters()) for part in module.modules()}
    shapes = {own for own in shapes if len(own) > 1 and max(map(len, own)) > 1}  # with weights that are replaced
    own = {id(parameter) for parameter in module.parameters()}
    for name, thing, tensors in _kept_outside_of_modules(module):
        if _shapes(tensors) in shapes and not any(id(tensor) in own for tensor in tensors):
            raise ConfigError(
                f"{name!r}, of type {type(thing).__name__}, has copies of weights that would not fit those that "
                "replace them; keep copies in a module, such as torch.optim.swa_utils.AveragedModel, or choose a "
                "method that leaves weights as they are."
            )


def _kept_outside_of_modules(module: nn.Module) -> Iterator[tuple[str, object, list[Tensor]]]:
    """Yield the plain attributes of all parts, with each list or dict of nothing but tensors in them."""
    for path, part in module.named_modules():
        for name, thing in vars(part).items():
            for tensors in () if name in _OF_MODULES else _lists_of_tensors(thing):
                yield f"{path}.{name}".lstrip("."), thing, tensors


def _lists_of_tensors(thing: object) -> Iterator[list[Tensor]]:
    """Yield what a list or a dict has, or a plain object in its attributes, where that is tensors alone."""
    inside = [thing] if isinstance(thing, list | tuple | dict) else getattr(thing, "__dict__", {}).values()
    for values in inside:
        if isinstance(values, list | tuple | dict):
            tensors = [*(values.values() if isinstance(values, dict) else values)]
            if all(isinstance(tensor, Tensor) for tensor in tensors):
                yield tensors


def _shapes(tensors: Iterable[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _left_alone(copies: list[Copy], loads: bool) -> set[nn.Module]:
    """Return the layers that stay as they are because a copy cannot keep its values, and say so."""
    different = [copy for copy in copies if not copy.equal and not loads]
    for copy in different:
        rank_zero_warn(
            f"{copy.path!r} is built like {copy.original!r} and frozen, but has other values, which factors cannot "
            "hold, so both stay dense. If it is a moving average, start it as a copy to have both factorized."
        )
    return {layer for copy in different for pair in copy.layers.values() for layer in pair}


def _copied(new: nn.Module, old: nn.Module, load: Callable[[nn.Module, nn.Module], None] | None) -> nn.Module:
    trained = any(weight.requires_grad for weight in old.parameters())
    copy = deepcopy(new).requires_grad_(trained).train(old.training)
    copy.is_copy = True  # type: ignore[assignment]
    if load is not None:
        load(copy, old)
    return copy


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
        raise ConfigError(
            f"model.learner: layer {path!r} {more}, which would be lost; only plain layers can be replaced. Give a "
            "network of these, a method that leaves them as they are, or model.factorization=null where one allows it."
        )


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
        return "is compiled on its own"
    return None
