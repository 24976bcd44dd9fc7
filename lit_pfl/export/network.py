"""A personalized network on its own: as a file, and as plain PyTorch.

``save_model(client.backbone, path)`` writes what one would ship: factors, sparse masks, biases and norms.
``save_model(to_dense(client.backbone), path)`` writes ordinary weights, which need nothing of this library::

    network = ResNet9(3, 10)
    network.load_state_dict(safetensors.torch.load_file(path))

What FedSLR learns: ``to_factors(client.backbone)`` computes the global model by its factors, and
``save_mixed(client.backbone, client.personal.backbone, path)`` writes factors and sparse entries of its mixed model.
``save_program(network, path, example)`` writes any of these with its computation, to be run without any class of it::

    network = torch.export.load(path).module()
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_pfl.core.payload import FROM_FACTORS, Payload
from lit_pfl.errors import ConfigError, PayloadError
from lit_pfl.nn import ComposedConv2d, ComposedLinear, composed_layers, factorized_layers, geometry
from lit_pfl.ops.low_rank import LowRank, as_matrix
from lit_pfl_callbacks.files import replacing, write_whole

Network = TypeVar("Network", bound=nn.Module)
#: what a mixed model's file calls the two components
COMMON, PERSONAL = "common.", "personal."


def to_dense(network: nn.Module) -> nn.Module:
    """Return a copy of a network in which every layer with a composed weight is a plain one with that weight.

    Args:
        network: any network; it stays as it is, and nothing is drawn from random generators.

    Returns:
        The copy, of the same class, with :class:`torch.nn.Conv2d` and :class:`torch.nn.Linear` instead of factorized
        and Hadamard layers. Their weights are those of evaluation: entries of mu below a layer's threshold count as
        zero. Or a plain layer, if ``network`` is such a layer itself.
    """
    network = copy.deepcopy(network)
    plain: dict[nn.Module, nn.Module] = {}  # by the layer that it stands for, so that a layer in two places stays one
    for path, layer in list(composed_layers(network)):
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
    is written next to its place and renamed, so that a former one stays whole until then.

    Args:
        network: a client's ``backbone``, or any network.
        path: the file; missing folders are made.

    Returns:
        What was written: ``nbytes`` is the size of the file, ``elements`` the number of elements, of masks only those
        that are not zero.

    Raises:
        ConfigError: for a tensor without a shape yet or of a type that a payload does not hold, and for an entry that
            is not a tensor.
    """
    tensors: dict[str, Tensor] = network.state_dict()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"Cannot save {name!r}: it is not a tensor but {type(tensor).__name__}.")
        if is_lazy(tensor):
            raise ConfigError(f"Cannot save {name!r}: it has no shape yet; run a batch through the network first.")
    masks = {
        f"{path}.mu".lstrip("."): layer.sparse_mu.detach()
        for path, layer in factorized_layers(network)
        if layer.sparse_mu is not None
    }
    return _write(Payload({**tensors, **masks}, sparse=masks), path)


def _write(payload: Payload, path: str | os.PathLike[str]) -> Payload:
    try:
        write_whole(Path(path), payload.to_bytes())
    except PayloadError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
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
    tensors = _read(path, "save_model", network)
    _load(tensors, network, path)
    return network


def _read(path: str | os.PathLike[str], writer: str, network: nn.Module) -> Payload:
    elements = sum(tensor.numel() for tensor in network.state_dict().values() if not is_lazy(tensor))
    try:
        return Payload.from_bytes(Path(path).read_bytes(), limit=max(elements, FROM_FACTORS))
    except PayloadError as error:
        raise ConfigError(f"{path} is not a file of {writer}: {error}") from None


def _load(tensors: Mapping[str, Tensor], network: nn.Module, path: str | os.PathLike[str]) -> None:
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


# ------------------------------------------------------------------------------------------------------------ low rank


def low_rank_weights(network: nn.Module, tolerance: float = 1e-6) -> dict[str, LowRank]:
    """Return the factors of all weights of convolutions and linear layers for which these are smaller.

    Args:
        network: any network.
        tolerance: singular values below this share of a weight's largest one count as zero: they are rounding errors.

    Returns:
        The factors by the weight's name in ``state_dict()``.
    """
    result: dict[str, LowRank] = {}
    known: dict[Tensor, LowRank | None] = {}  # by the weight, which may be in several places
    for path, layer in network.named_modules(remove_duplicate=False):
        if type(layer) not in (nn.Conv2d, nn.Linear) or not layer.weight.numel():
            continue
        if layer.weight not in known:
            known[layer.weight] = _low_rank(layer.weight.detach(), tolerance)
        if (factors := known[layer.weight]) is not None:
            result[f"{path}.weight".lstrip(".")] = factors
    return result


def _low_rank(weight: Tensor, tolerance: float) -> LowRank | None:
    """Return the factors of a weight if they are smaller."""
    u, s, vt = torch.linalg.svd(as_matrix(weight).double(), full_matrices=False)
    kept = s > tolerance * s.max().clamp(min=torch.finfo(weight.dtype).tiny)
    root = s[kept].sqrt()
    left, right = (u[:, kept] * root).to(weight), (root[:, None] * vt[kept]).to(weight)
    factors = LowRank(left, right, tuple(weight.shape))
    return factors if factors.saves else None


def to_factors(network: nn.Module, tolerance: float = 1e-6) -> nn.Module:
    """Return a copy of a network that computes with the factors of its weights where these are smaller.

    Args:
        network: any network, for example the ``backbone`` of a client of FedSLR; it stays as it is.
        tolerance: see :func:`low_rank_weights`.

    Returns:
        The copy. Instead of a linear layer of rank r it has two, with r values in between. Instead of a convolution
        it has one with the width of its window that makes r channels, and one with the height that makes its outputs.
        Convolutions in groups, or with padding by a name, stay as they are, and so do the linear layers of a
        :class:`torch.nn.TransformerEncoderLayer`, which looks at their weights itself.
    """
    factors = low_rank_weights(network, tolerance)
    network = copy.deepcopy(network)
    made: dict[nn.Module, nn.Module] = {}  # by the layer that they stand for, so that a layer in two places stays one
    for path, layer in list(network.named_modules(remove_duplicate=False)):
        found = factors.get(f"{path}.weight".lstrip("."))
        if found is None or (isinstance(layer, nn.Conv2d) and not _divides(layer)):
            continue
        if isinstance(network.get_submodule(path.rpartition(".")[0]), nn.TransformerEncoderLayer):
            continue
        if layer not in made:
            made[layer] = _halves(layer, found)
        if not path:
            return made[layer]
        network.set_submodule(path, made[layer])
    return network


def _divides(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _halves(layer: nn.Module, factors: LowRank) -> nn.Sequential:
    """Return two layers with the factors as weights; of rank 0, with one channel of zeros: there are none without."""
    if not factors.rank:
        left, right = factors.left.new_zeros(len(factors.left), 1), factors.right.new_zeros(1, factors.right.shape[1])
        factors = LowRank(left, right, factors.shape)
    first: nn.Module
    second: nn.Module
    # On the meta device, so that no initial weights are drawn.
    if isinstance(layer, nn.Conv2d):
        inputs, outputs, (height, width) = layer.in_channels, layer.out_channels, layer.kernel_size
        (sh, sw), (dh, dw) = layer.stride, layer.dilation
        ph, pw = (int(size) for size in layer.padding)
        across = {"stride": (1, sw), "padding": (0, pw), "dilation": (1, dw)}
        down = {"stride": (sh, 1), "padding": (ph, 0), "dilation": (dh, 1)}
        first = nn.Conv2d(inputs, factors.rank, (1, width), **across, bias=False, device="meta")  # type: ignore[arg-type]
        second = nn.Conv2d(factors.rank, outputs, (height, 1), **down, device="meta")  # type: ignore[arg-type]
        left = factors.left.reshape(outputs, height, factors.rank).transpose(1, 2)[..., None]
        right = factors.right.reshape(factors.rank, inputs, 1, width)
    else:
        assert isinstance(layer, nn.Linear)
        first = nn.Linear(layer.in_features, factors.rank, bias=False, device="meta")
        second = nn.Linear(factors.rank, layer.out_features, device="meta")
        left, right = factors.left, factors.right
    first.weight, second.weight = nn.Parameter(right.contiguous()), nn.Parameter(left.contiguous())
    second.bias = layer.bias
    return nn.Sequential(first, second).train(layer.training)


def save_mixed(common: nn.Module, personal: nn.Module, path: str | os.PathLike[str]) -> Payload:
    """Write a model that is the sum of one of low rank and a sparse one, as safetensors, each in its own encoding.

    Args:
        common: a FedSLR client's ``backbone``; its weights are written in factors where these are smaller.
        personal: the client's ``personal.backbone``: parameters to be added, and the buffers of the sum.
        path: the file; missing folders are made.

    Returns:
        What was written, see :func:`save_model`.
    """
    weights = common.named_parameters(remove_duplicate=False)  # with all names of those in several places
    low_rank = {COMMON + name: factors for name, factors in low_rank_weights(common).items()}
    plain = {COMMON + name: p.detach() for name, p in weights if COMMON + name not in low_rank}
    other = {PERSONAL + name: tensor for name, tensor in personal.state_dict().items()}
    return _write(Payload({**plain, **other}, sparse=other, low_rank=low_rank), path)


def load_mixed(path: str | os.PathLike[str], network: Network) -> Network:
    """Load a file of :func:`save_mixed` into a plain network, in place: the sum of both components.

    Args:
        path: the file.
        network: one of the same structure.

    Returns:
        The same network.

    Raises:
        ConfigError: when the file is not such a file, or does not fit; the network then stays as it is.
        FileNotFoundError: when there is no such file.
    """
    tensors = _read(path, "save_mixed", network)
    parts = {name.removeprefix(PERSONAL): tensor for name, tensor in tensors.items() if name.startswith(PERSONAL)}
    for name, tensor in tensors.items():
        own = name.removeprefix(COMMON)
        if own != name:
            if own not in parts:
                raise ConfigError(f"{path} is not a file of save_mixed: it has {name!r} and no {PERSONAL + own!r}.")
            parts[own] = tensor + parts[own]
    _load(parts, network, path)
    return network


def save_program(network: nn.Module, path: str | os.PathLike[str], example: Tensor) -> None:
    """Write a network with its computation, in evaluation mode, as ``torch.export`` has it.

    ``torch.export.load(path).module()`` runs it on batches of any size, without this library or any class of its own.

    Args:
        network: any network that computes with tensors alone.
        path: the file, by custom ``.pt2``.
        example: (B, C, H, W) images of the right size, B at least 2.
    """
    network = copy.deepcopy(network).eval()
    sizes = torch.export.ShapesCollection()  # which finds the example also where forward takes *inputs
    sizes[example] = {0: torch.export.Dim("batch", max=2**31 - 1)}
    with torch.no_grad():
        shapes = sizes.dynamic_shapes(network, (example,))
        program = torch.export.export(network, (example,), dynamic_shapes=shapes, strict=False)  # PyTorch 2.6: True
    with replacing(Path(path)) as file:
        torch.export.save(program, file)
