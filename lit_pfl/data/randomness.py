"""Random numbers of data sets that draw some by themselves."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def random_state() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and PyTorch's default generators, to be compared or put back."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Say whether two such states are equal: whether nothing was drawn in between."""
    return a[0] == b[0] and all(map(np.array_equal, a[1], b[1])) and torch.equal(a[2], b[2])


def _set_state(state: tuple[Any, ...]) -> None:
    python, numpy, pytorch = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(pytorch)


@contextmanager
def _draws_put_back() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        _set_state(before)


@contextmanager
def fixed_draws(seed: int) -> Iterator[None]:
    """Seed those generators for a while, and put them back."""
    with _draws_put_back():
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        yield


class FixedDraws(Dataset):
    """A dataset whose sample i is the same every time, whatever the dataset draws at random to make it.

    A batch of samples, where the dataset takes a list of their numbers, is fixed by the first of them.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: Any) -> Any:
        with fixed_draws(position[0] if isinstance(position, list) else position):
            return self.dataset[position]


class FixedIteration:
    """A loader whose batches are the same at every iteration, whatever is drawn at random to choose and to make them.

    It draws from generators that are seeded anew for every iteration, and leaves those of the process as they are.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with fixed_draws(0):
            batches, state = iter(self.loader), random_state()
        while True:
            with _draws_put_back():
                _set_state(state)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                state = random_state()
            yield batch
