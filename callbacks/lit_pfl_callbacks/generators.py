"""Save and restore the states of generators of random numbers that a loader has of its own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


class OwnGenerators:
    """The generators that a loader, what orders its samples, or its stream has, as ``DataLoader(generator=...)``.

    Args:
        loader: the loader, or a list, tuple or dict of some.
    """

    def __init__(self, loader: Any) -> None:
        found = {id(generator): generator for generator in _found(loader)}
        self._generators = [*found.values()]
        #: their states when this was made
        self.initial = self.states()

    def shared_with(self, other: "OwnGenerators") -> bool:
        """Say whether one of them is also among another loader's."""
        return any(one is another for one in self._generators for another in other._generators)

    def states(self) -> list[Any]:
        """Return their states, as tensors and plain values."""
        return [_state(generator) for generator in self._generators]

    def restore(self, states: list[Any]) -> None:
        """Restore states of :meth:`states`, unless they are of other kinds of generators: of another loader."""
        if [*map(_kind, states)] == [*map(_kind, self.initial)]:
            for generator, state in zip(self._generators, states, strict=True):
                _set_state(generator, state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put their states back afterwards."""
        before = self.states()
        try:
            yield
        finally:
            self.restore(before)


def _found(loader: Any) -> Iterator[Any]:
    if isinstance(loader, dict | list | tuple):
        for one in loader.values() if isinstance(loader, dict) else loader:
            yield from _found(one)
        return
    batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    orders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    for holder in (*orders, dataset if isinstance(dataset, IterableDataset) else None):
        yield from (value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, KINDS))


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return _plain(generator.bit_generator.state)
        case np.random.RandomState():
            return _plain(generator.get_state(legacy=False))
        case _:
            return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state.cpu())
        case np.random.Generator():
            generator.bit_generator.state = _of_numpy(state)
        case np.random.RandomState():
            generator.set_state(_of_numpy(state))
        case _:
            generator.setstate(state)


def _kind(state: Any) -> Any:
    return state.get("bit_generator") if isinstance(state, dict) else type(state)


def _plain(state: Any) -> Any:
    """Return a state of NumPy's with lists for arrays, which a checkpoint may not hold."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _of_numpy(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _of_numpy(value) for name, value in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state
