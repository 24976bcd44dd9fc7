"""Random numbers: the federation's draws, every client's own stream, and samples that are made the same every time."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import Dataset

from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.random_state import torch_state_kept


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
    """The random state of one client: Python's, NumPy's and PyTorch's generators.

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


class FixedCall:
    """A function that draws the same at every call, such as a ``collate_fn`` that masks or mixes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        with fixed_draws(0):
            return self.function(*args)


class FixedIteration:
    """A loader whose batches are the same at every iteration, whatever is drawn at random to choose and to make them.

    It draws from generators that are seeded again for every iteration, and leaves those of the process as they are. It
    ends at the loader's length, as a Trainer does: some loaders begin again there, or never end.

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
        length = sized_len(self.loader)
        for _ in count() if length is None else range(length):
            with _draws_put_back():
                _set_state(state)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                state = random_state()
            yield batch
