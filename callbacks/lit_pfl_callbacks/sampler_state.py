"""What a sampler of somebody's own keeps from epoch to epoch: an order that it shuffles in place, or a count."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

#: types of single values
PLAIN = bool, int, float, str, type(None)
#: attributes that hold the samples, not their order
SAMPLES = "data_source", "dataset"
#: how deep lists and dicts are looked into
DEPTH = 3


def keeps_state(holder: Any) -> bool:
    """Say whether something is a sampler that has such a state, and none of PyTorch's, which keep nothing."""
    kind = type(holder)
    return issubclass(kind, Sampler) and not kind.__module__.startswith("torch.") and bool(sampler_state(holder))


def sampler_state(sampler: Any) -> dict[str, Any]:
    """Return copies of those attributes that are numbers or words, and lists, dicts and vectors of them, by name."""
    own = {name: value for name, value in vars(sampler).items() if name not in SAMPLES}
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def set_sampler_state(sampler: Any, state: dict[str, Any]) -> None:
    """Take over such a state, where kinds and sizes agree; lists, dicts and arrays stay the same objects."""
    own = vars(sampler)
    for name in own.keys() & state.keys():
        own[name] = _put(own[name], state[name])


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    kind = type(value)
    if kind in (list, dict):
        parts = value.values() if kind is dict else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    if kind is np.ndarray:
        return value.ndim == 1 and value.dtype.kind in "biuf"
    return kind in PLAIN or (kind is Tensor and value.ndim == 1)


def _copied(value: Any) -> Any:
    match value:
        case list():
            return [_copied(one) for one in value]
        case dict():
            return {name: _copied(one) for name, one in value.items()}
        case np.ndarray():  # which a checkpoint may not hold
            return torch.from_numpy(value.copy())
        case Tensor():
            return value.detach().clone()
    return value


def _put(now: Any, value: Any) -> Any:
    """Return a value in the place of another one: the same object with what the other one holds, where it can be."""
    match now, value:
        case np.ndarray(), Tensor() if now.shape == value.shape and now.flags.writeable:
            now[...] = value.cpu().numpy()
        case Tensor(), Tensor() if now.shape == value.shape:
            now.data.copy_(value)
        case list(), list() if len(now) == len(value):
            now[:] = map(_put, now, value)
        case list(), list():
            now[:] = _copied(value)
        case dict(), dict() if now.keys() == value.keys():
            now.update({name: _put(now[name], value[name]) for name in now})
        case _ if type(now) in PLAIN and type(value) in PLAIN:
            return value
    return now
