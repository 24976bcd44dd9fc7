"""What a sampler of somebody's own keeps from epoch to epoch: an order that it shuffles in place, or a count."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

#: types of single values
PLAIN = {bool, int, float, str, type(None)}
#: attributes that hold the samples, not their order
SAMPLES = {"data_source", "dataset"}
#: how deep lists and dicts are looked into
DEPTH = 3


class SamplerState:
    """Those attributes of a sampler that are numbers or words, and lists, dicts and vectors of them.

    Args:
        sampler: the sampler. What of it never changes, as a size of batches, is not part of its state.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.first = self._now()

    @staticmethod
    def of(holder: Any) -> "SamplerState | None":
        """Return the state of something that is a sampler, and none of PyTorch's, which keep nothing."""
        kind = type(holder)
        if not issubclass(kind, Sampler) or kind.__module__.startswith("torch."):
            return None
        state = SamplerState(holder)
        return state if state.first else None

    def _attributes(self) -> dict[str, Any]:
        """Return the sampler's attributes, without running code of its own."""
        attributes: dict[str, Any] = object.__getattribute__(self.sampler, "__dict__")
        return attributes

    def _now(self) -> dict[str, Any]:
        own = self._attributes().items()
        return {name: _copied(value) for name, value in own if name not in SAMPLES and _is_plain(value)}

    def get(self) -> dict[str, Any]:
        """Return copies of the attributes that have changed since this was made, by name; arrays as tensors."""
        return {k: v for k, v in self._now().items() if k not in self.first or not _same(v, self.first[k])}

    def set(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get` returned, where kinds and sizes agree; lists and arrays stay the same objects."""
        own = self._attributes()
        for name, value in {**self.first, **state}.items():
            if name in own:
                own[name] = _put(own[name], value)


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    kind = type(value)
    if kind in (list, dict):
        parts = value.values() if kind is dict else value
        return {*map(type, parts)} <= PLAIN or (depth > 0 and all(_is_plain(part, depth - 1) for part in parts))
    if kind is np.ndarray:
        return value.ndim == 1 and value.dtype.kind in "biuf"
    return kind in PLAIN or (kind is Tensor and value.ndim == 1)


def _copied(value: Any) -> Any:
    match value:
        case list():
            return value.copy() if {*map(type, value)} <= PLAIN else [_copied(one) for one in value]
        case dict():
            return {name: _copied(one) for name, one in value.items()}
        case np.ndarray():  # which a checkpoint may not hold
            return torch.from_numpy(value.copy())
        case Tensor():
            return value.detach().clone()
    return value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            return torch.equal(one, other)
        case list() if not {*map(type, one)} <= PLAIN:
            return len(one) == len(other) and all(map(_same, one, other))
        case dict():
            return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _put(now: Any, value: Any) -> Any:
    """Return a value in the place of another one: the same object with what the other one holds, where it can be."""
    match now, value:
        case np.ndarray(), Tensor() if now.shape == value.shape and now.flags.writeable:
            now[...] = value.cpu().numpy()
        case Tensor(), Tensor() if now.shape == value.shape:
            now.data.copy_(value)
        case list(), list() if len(now) != len(value) or {*map(type, value)} <= PLAIN:
            now[:] = _copied(value)
        case list(), list():
            now[:] = map(_put, now, value)
        case dict(), dict() if now.keys() == value.keys():
            now.update({name: _put(now[name], value[name]) for name in now})
        case _ if type(now) in PLAIN and type(value) in PLAIN:
            return value
    return now
