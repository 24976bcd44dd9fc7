"""Random numbers of data sets that draw some by themselves."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and PyTorch's default generators, to be compared or put back."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Say whether two such states are equal: whether nothing was drawn in between."""
    return a[0] == b[0] and all(map(np.array_equal, a[1], b[1])) and torch.equal(a[2], b[2])


@contextmanager
def fixed_draws(seed: int) -> Iterator[None]:
    """Seed those generators for a while, and put them back."""
    python, numpy, pytorch = random_state()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(pytorch)
