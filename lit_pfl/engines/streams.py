"""Every client's own randomness, in a process that they share."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomStream:
    """The random state of one client: Python's, NumPy's and PyTorch's generators.

    Args:
        seed: the federation's seed.
        purpose: the client's id, and what else tells streams apart. Different ones are independent.
    """

    def __init__(self, seed: int, *purpose: int) -> None:
        words = np.random.SeedSequence([seed, *purpose]).generate_state(4, np.uint32).tolist()
        self._state = _RandomState(
            torch.Generator().manual_seed(words[0] << 32 | words[1]).get_state(),
            words[0] << 32 | words[1],
            np.random.MT19937(words[2]),
            random.Random(words[3]).getstate(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        numpy_state: Any = self._state.numpy.state
        key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        position = int(numpy_state["state"]["pos"])
        return {**self._state._asdict(), "numpy": [numpy_state["bit_generator"], key, position]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        name, key, position = state["numpy"]
        generator = np.random.MT19937()
        generator.state = {"bit_generator": name, "state": {"key": key.numpy().astype(np.uint32), "pos": position}}
        self._state = _RandomState(**{**state, "numpy": generator})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the process's random state, and leave it there: see :func:`random_state_kept`."""
        _set_random_state(self._state)
        try:
            yield
        finally:
            after = _get_random_state()
            self._state = after if after.cuda is not None else after._replace(cuda=self._state.cuda)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the process's random state back afterwards, once for all the streams that are active in between."""
    outside = _get_random_state()
    try:
        yield
    finally:
        _set_random_state(outside)


@contextmanager
def scoring_draws(seed: int, client: int = 0) -> Iterator[None]:
    """Let a model that is scored draw the same at every evaluation, whoever else is scored; see `random_state_kept`.

    Args:
        seed: the federation's seed.
        client: whose model it is.
    """
    with random_state_kept(), RandomStream(seed, client, 1).active():
        yield


class _RandomState(NamedTuple):
    torch: Tensor
    cuda: Tensor | int | None  # a number is a seed, for a device that is not in use yet
    numpy: np.random.BitGenerator  # swapped whole: reading and writing its state takes a hundred times longer
    python: Any


def _get_random_state() -> _RandomState:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
    return _RandomState(torch.get_rng_state(), cuda, numpy, random.getstate())


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state.torch)
    np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]
    random.setstate(state.python)
    if isinstance(state.cuda, Tensor):
        torch.cuda.set_rng_state(state.cuda)
    elif state.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.manual_seed(state.cuda)
