"""A personalized network by itself: as a file, and as plain PyTorch.

``save_model(client.backbone, path)`` writes what one would ship: factors, sparse masks, biases and norms.
``save_model(to_dense(client.backbone), path)`` writes ordinary weights, which need nothing of this library::

    network = ResNet9(3, 10)
    network.load_state_dict(safetensors.torch.load_file(path))
"""

import copy
import os
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_pfl.errors import ConfigError
from lit_pfl.nn import ComposedConv2d, ComposedLinear, factorized_layers, geometry
from lit_pfl.payload import Payload
from lit_pfl_callbacks.files import replacing

Network = TypeVar("Network", bound=nn.Module)


def to_dense(network: nn.Module) -> nn.Module:
    """Return a copy of a network in which every layer with a composed weight is a plain one with that weight.

    Args:
        network: any network; it stays as it is, and nothing is drawn from random generators.

    Returns:
        The copy, of the same class, with :class:`torch.nn.Conv2d` and :class:`torch.nn.Linear` in place of factorized
        and Hadamard layers. Their weights are those of evaluation: entries of mu below a layer's threshold count as
        zero. Or a plain layer, if ``network`` is such a layer itself.
    """
    network = copy.deepcopy(network)
    plain: dict[nn.Module, nn.Module] = {}  # by the layer that it stands for, so that a layer in two places stays one
    for path, layer in list(network.named_modules(remove_duplicate=False)):
        if not isinstance(layer, ComposedConv2d | ComposedLinear):
            continue
        if layer not in plain:
            plain[layer] = _plain(layer)
        if not path:
            return plain[layer]
        network.set_submodule(path, plain[layer])
    return network


def _plain(layer: ComposedConv2d | ComposedLinear) -> nn.Module:
    """Return the plain layer with the weight that a layer has in evaluation."""
    new: nn.Conv2d | nn.Linear
    # On the meta device, so that no initial weights are drawn.
    if isinstance(layer, ComposedConv2d):
        out, inputs, *window = layer.weight_shape
        new = nn.Conv2d(inputs * layer.groups, out, (window[0], window[1]), **geometry(layer), device="meta")
    else:
        new = nn.Linear(layer.in_features, layer.out_features, device="meta")
    new.train(layer.training)
    new.weight = nn.Parameter(layer.eval().weight.detach())
    new.bias = layer.bias
    return new


def save_model(network: nn.Module, path: str | os.PathLike[str]) -> Payload:
    """Write a network's tensors to a file, as safetensors.

    Entries of a mask mu below its layer's threshold are left out, and a mask with enough zeros is written as a bit map
    and its values (see :class:`~lit_pfl.Payload`). A network without masks makes an ordinary safetensors file. The file
    is written beside its place and renamed, so that a former one stays whole until then.

    Args:
        network: a client's ``backbone``, or any network.
        path: the file; missing folders are made.

    Returns:
        What was written: ``nbytes`` is the size of the file, ``elements`` the number of elements, of masks only those
        that are not zero.

    Raises:
        ConfigError: for a tensor without a shape yet, and for an entry that is no tensor.
    """
    tensors: dict[str, Tensor] = network.state_dict()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"Cannot save {name!r}: it is no tensor but {type(tensor).__name__}.")
        if is_lazy(tensor):
            raise ConfigError(f"Cannot save {name!r}: it has no shape yet; run a batch through the network first.")
    masks = {
        f"{path}.mu".lstrip("."): layer.sparse_mu.detach()
        for path, layer in factorized_layers(network)
        if layer.sparse_mu is not None
    }
    payload = Payload({**tensors, **masks}, sparse=masks)
    with replacing(Path(path)) as file:
        file.write(payload.to_bytes())
    return payload


def load_model(path: str | os.PathLike[str], network: Network) -> Network:
    """Load a file of :func:`save_model` into a network, in place.

    Args:
        path: the file.
        network: one of the same structure; for a factorized one, factorized in the same form, rank and pi. Layers that
            take their shape from their first input (``CNN``, ``MLP``, ``VGG9``) must have had one before the network
            is factorized.

    Returns:
        The same network, with the file's tensors.

    Raises:
        ConfigError: when the file is not such a file, or does not fit; the message names the tensor, and the network
            stays as it is.
        FileNotFoundError: when there is no such file.
    """
    try:
        tensors = Payload.from_bytes(Path(path).read_bytes())
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} is not a file of save_model: {error}") from None
    own, misfit = network.state_dict(), f"{path} does not fit this {type(network).__name__}"
    for name, tensor in own.items():
        if name not in tensors:
            raise ConfigError(f"{misfit}: it has no {name!r}.")
        if not is_lazy(tensor) and tensor.shape != tensors[name].shape:
            shapes = tuple(tensors[name].shape), tuple(tensor.shape)
            raise ConfigError(f"{misfit}: its {name!r} has shape {shapes[0]}, the network's {shapes[1]}.")
    for name in sorted(tensors.keys() - own.keys()):
        raise ConfigError(f"{misfit}: it holds {name!r}, which the network does not have.")
    network.load_state_dict(tensors)
    return network
