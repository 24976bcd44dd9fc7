"""Random numbers: the federation's draws, and every client's own stream."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.generators import OwnGenerators, plain
from lit_pfl_callbacks.random_state import draws_put_back, torch_state_kept


class Draws:
    """Random numbers for any number of purposes, independent of one another.

    Args:
        seed: the federation's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, *purpose: str | int) -> np.random.Generator:
        """Return a fresh generator for a purpose: the same one whenever it is asked for."""
        words = [w if isinstance(w, int) else int.from_bytes(w.encode(), "big") for w in purpose]
        return np.random.default_rng([self.seed, *words])

    @contextmanager
    def default_generators(self, purpose: str) -> Iterator[None]:
        """Let the default generators of PyTorch, NumPy and Python draw for a purpose, then put them back."""
        seed = int(self.generator(purpose).integers(2**63))
        python, numpy = random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
        try:
            with torch_state_kept():
                seed_torch(seed)
                random.seed(seed)
                np.random.set_bit_generator(np.random.MT19937(seed))  # type: ignore[attr-defined]
                yield
        finally:
            random.setstate(python)
            np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]

    def choose(self, ids: Sequence[int], share: float, *purpose: str | int) -> list[int]:
        """Return a share of some ids, at least one, or if it is above 1 this many of them; in their order."""
        count = number_of(share, len(ids))
        if count == len(ids):
            return list(ids)
        chosen = self.generator(*purpose).choice(len(ids), count, replace=False)
        return [ids[i] for i in sorted(chosen)]


def number_of(share: float, total: int) -> int:
    """Return how many a share of some things is, at least one; a share above 1 is a number, up to the total."""
    return min(total, max(1, round(share * total) if share <= 1 else int(share)))


def fixed_order(number: int, client: int) -> Tensor:
    """Return (number,) int64, a random order that is a client's own: the same at any time, and in a resumed run."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(client))


def seed_torch(seed: int) -> None:
    """Do what ``torch.manual_seed`` does.

    That notes for every kind of accelerator where it was called, and takes longer than making a small network, so it is
    left to machines that have one.
    """
    (torch.manual_seed if _has_accelerator() else torch.default_generator.manual_seed)(seed)


@cache
def _has_accelerator() -> bool:
    return any(kind.is_available() for kind in (torch.cuda, torch.xpu, torch.mtia, torch.backends.mps))


def check_share(option: str, share: float, num_clients: int | None = None) -> None:
    """See that an option is a share of the clients or a number of them.

    Raises:
        ConfigError: when it is not, or when there are fewer clients.
    """
    if not isinstance(share, Number) or not (0 < share <= 1 or (share > 1 and share % 1 == 0)):
        raise ConfigError(f"{option}={share!r}: give a share above 0 and up to 1, or a whole number of clients.")
    if num_clients is not None and share > num_clients:
        raise ConfigError(f"{option}={share:g} is more than the {num_clients} clients.")


class RandomStream:
    """The random state of one client: Python's, NumPy's and PyTorch's generators, and those that its loader has.

    Args:
        seed: the federation's seed.
        purpose: the client's id, and what else distinguishes streams. Different ones are independent.
    """

    def __init__(self, seed: int, *purpose: int) -> None:
        words = np.random.SeedSequence([seed, *purpose]).generate_state(4, np.uint32).tolist()
        self._state = _RandomState(
            torch.Generator().manual_seed(words[0] << 32 | words[1]).get_state(),
            words[0] << 32 | words[1],
            np.random.MT19937(words[2]),
            random.Random(words[3]).getstate(),
        )
        #: those that the client's loader has, which draw for nobody else while this stream is active
        self.own = OwnGenerators(())
        self._states: list[Any] | None = None  # of these; None: as they were at first

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        numpy_state: Any = self._state.numpy.state
        key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        position = int(numpy_state["state"]["pos"])
        own = {"own": plain(self._states)} if self._states else {}
        return {**self._state._asdict(), "numpy": [numpy_state["bit_generator"], key, position], **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        state = {**state}
        self._states = state.pop("own", None)
        name, key, position = state["numpy"]
        generator = np.random.MT19937()
        generator.state = {"bit_generator": name, "state": {"key": key.numpy().astype(np.uint32), "pos": position}}
        self._state = _RandomState(**{**state, "numpy": generator})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the process's random state, and leave it there: see :func:`random_state_kept`.

        Generators of the loader are put back, since other clients may have the same ones.
        """
        _set_random_state(self._state)
        try:
            with self.own.kept():
                self.own.restore(self.own.initial if self._states is None else self._states)
                try:
                    yield
                finally:
                    self._states = self.own.states()
        finally:
            after = _get_random_state()
            self._state = after if after.cuda is not None else after._replace(cuda=self._state.cuda)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the process's random state back afterwards, once for all the streams that are active in between.

    Except for a normal number that NumPy has drawn in advance, see :func:`normal_number_kept`.
    """
    outside = _get_random_state()
    try:
        yield
    finally:
        _set_random_state(outside)


@contextmanager
def normal_number_kept() -> Iterator[None]:
    """Put back the normal number that ``np.random.normal`` draws in advance, which swapped generators lose."""
    before: Any = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        if before[3]:
            after: Any = np.random.get_state()  # noqa: NPY002
            np.random.set_state((*after[:3], *before[3:]))  # noqa: NPY002


@contextmanager
def scoring_draws(seed: int, client: int = 0, own: OwnGenerators | None = None) -> Iterator[None]:
    """Let a model that is scored draw the same at every evaluation, whoever else is scored; see `random_state_kept`.

    Args:
        seed: the federation's seed.
        client: whose model it is.
        own: generators of the loaders that it is scored on.
    """
    stream = RandomStream(seed, client, 1)
    if own is not None:
        stream.own = own
    with random_state_kept(), stream.active():
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


def random_state() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and PyTorch's default generators, to be compared or put back."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Say whether two such states are equal: whether nothing was drawn in between."""
    return a[0] == b[0] and all(map(np.array_equal, a[1], b[1])) and torch.equal(a[2], b[2])


def set_state(state: tuple[Any, ...]) -> None:
    """Put such a state back."""
    python, numpy, pytorch = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(pytorch)


@contextmanager
def fixed_draws(seed: int) -> Iterator[None]:
    """Seed those generators for a while, and put them back."""
    with draws_put_back():
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        yield
