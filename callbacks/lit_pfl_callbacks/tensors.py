"""A module's tensors by name, and its mode."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX


def check_patterns(option: str, *patterns: str) -> None:
    """See that names of tensors can be searched by these.

    Args:
        option: whose value they are, with its class.
        patterns: regular expressions.

    Raises:
        MisconfigurationException: when one is not.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise MisconfigurationException(f"{option}: {pattern!r} is not a regular expression: {error}.") from None


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's ``state_dict()``: what else it holds (``get_extra_state``) is left out."""
    return {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
    }


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, of types that numpy does not know too; copied only where they do not lie in order on the
    CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:  # of one element that was expanded, which is contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a ``state_dict()``, whatever it holds, that what is trained on does not change."""
    return {name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's parameter or buffer by its name.

    Raises:
        MisconfigurationException: when the module has no such tensor.
    """
    own: Any = module
    for part in name.split("."):
        own = getattr(own, part, None)
    if not isinstance(own, Tensor):
        raise MisconfigurationException(
            f"The reply holds {name!r}, which {type(module).__name__} does not have; a method's download() takes such "
            "a tensor out before it loads the rest, or its server's is_averaged() keeps it back."
        )
    return own


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into a module's parameters and buffers of the same names, in place.

    Raises:
        MisconfigurationException: when the module has no such tensor, or one of another shape.
    """
    for name, tensor in tensors.items():
        own = tensor_of(module, name)
        if own.shape != tensor.shape:
            raise MisconfigurationException(
                f"The reply's {name!r} has shape {tuple(tensor.shape)}; "
                f"{type(module).__name__} needs {tuple(own.shape)}."
            )
        own.copy_(tensor)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and back, every part as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
