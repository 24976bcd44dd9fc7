"""What a checkpoint holds of payloads and of what a server keeps: tensors and plain values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_pfl.core.payload import Payload
from lit_pfl.errors import ConfigError
from lit_pfl.ops.low_rank import LowRank

#: the entries of a payload's state, by which it is known among the dicts of a checkpoint
_PARTS = {"tensors", "sparse", "factors"}
#: what a checkpoint holds as it is
_PLAIN = (Tensor, str, bytes, set, torch.Size, torch.dtype, torch.device, type(None))
#: what other numbers become: those of the command line are of classes of its own
_NUMBERS: tuple[Any, ...] = (bool, int, float, complex)


def payload_state(payload: Payload) -> dict[str, Any]:
    """Return what a checkpoint holds of a payload, as tensors and plain values."""
    whole = {name: tensor for name, tensor in payload.items() if name not in payload.low_rank}
    factors = {name: (f.left, f.right, f.shape) for name, f in payload.low_rank.items()}
    return {"tensors": whole, "sparse": sorted(payload.sparse), "factors": factors}


def payload_from(state: Mapping[str, Any]) -> Payload:
    """Return the payload that a state of :func:`payload_state` is of."""
    factors = {name: LowRank(*parts) for name, parts in state["factors"].items()}
    return Payload(state["tensors"], state["sparse"], factors)


def saved(value: Any, name: str) -> Any:
    """Return what a checkpoint holds of a value.

    Args:
        value: a tensor, a plain value, a payload, or dicts and lists of them.
        name: what it is called, for an error.

    Raises:
        ConfigError: when it is something else, which could be written but not read.
    """
    if isinstance(value, Payload):
        return payload_state(value)
    if isinstance(value, Mapping):
        return {key: saved(one, name) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(saved(one, name) for one in value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    for kind in _NUMBERS:
        if isinstance(value, kind):
            return kind(value)
    raise ConfigError(
        f"{name} holds a {type(value).__name__}, which no checkpoint can; keep tensors, numbers, words and payloads, "
        "or dicts and lists of them."
    )


def restored(state: Any) -> Any:
    """Return the value that a state of :func:`saved` is of."""
    if isinstance(state, Mapping):
        if state.keys() == _PARTS:
            return payload_from(state)
        return {key: restored(one) for key, one in state.items()}
    return type(state)(map(restored, state)) if type(state) in (list, tuple) else state
