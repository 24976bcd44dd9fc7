"""Samples and batches that are made the same every time, whatever is drawn at random to make them."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from operator import is_not
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, Dataset, Subset

from lit_pfl.randomness import fixed_draws, random_state, set_state
from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.loader_state import has_state, load_loader_state, loader_state
from lit_pfl_callbacks.random_state import draws_put_back

#: lists up to this length are put back; in longer ones are all samples of a dataset
MANY = 10_000


def without_persistent_workers(loader: Any) -> Any:
    """Return a DataLoader like one whose worker processes outlive an epoch, whose own end with it.

    Their random numbers run on from epoch to epoch, and nobody could restore them; every client would have some.
    """
    if not (isinstance(loader, DataLoader) and loader.persistent_workers):
        return loader
    other = copy.copy(loader)
    vars(other).update(persistent_workers=False, _iterator=None)  # which the loader lets nobody set
    return other


class PositionKept:
    """Lets a dataset be where it was afterwards, if its samples move it on, as torchio's queue of patches.

    What it has only loaded by then, or stored to have it sooner, it keeps. A dataset with a list of more than ``MANY``
    that has changed stays as it is.
    """

    def __init__(self, dataset: Any) -> None:
        self._attributes = [(vars(part), {**vars(part)}) for part in _datasets(dataset, {})]
        lists = [x for _, then in self._attributes for x in then.values() if isinstance(x, list | deque)]
        self._lengths = [(x, len(x)) for x in lists]
        self._contents = [(x, [*x]) for x in lists if len(x) <= MANY]

    def __enter__(self) -> "PositionKept":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.has_moved() or any(MANY < then != len(now) for now, then in self._lengths):
            return
        for own, attributes in self._attributes:
            own.clear()
            own.update(attributes)
        for own, content in self._contents:
            own.clear()
            own.extend(content)

    def has_moved(self) -> bool:
        """Say whether a number in it is another one by now, or a list has lost something."""
        values = ((own.get(name), x) for own, then in self._attributes for name, x in then.items())
        changed = (type(x) in (int, float) and type(now) is type(x) and now != x for now, x in values)
        lost = (len(now) < len(then) or any(map(is_not, now, then)) for now, then in self._contents)
        return any(changed) or any(lost)


def _datasets(dataset: Any, known: dict[int, Any]) -> list[Any]:
    """Return a dataset and those that it is made of."""
    if id(dataset) not in known and hasattr(dataset, "__dict__"):
        known[id(dataset)] = dataset
        for value in vars(dataset).values():
            parts = value if isinstance(value, list | tuple) else [value]
            if parts and isinstance(parts[0], Dataset):
                for part in parts:
                    _datasets(part, known)
    return [*known.values()]


class Look(DataLoader):
    """A DataLoader to look at samples with, which leaves their dataset where it was."""

    def __iter__(self) -> Any:
        with PositionKept(self.dataset):
            yield from super().__iter__()


class FixedDraws(Dataset):
    """A dataset whose sample i is the same every time, whatever the dataset draws at random to make it.

    A batch of samples, where the dataset makes them from a list of their numbers, is fixed by the first of them.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: Any) -> Any:
        seed = int(position[0] if isinstance(position, list) else position)
        with fixed_draws(seed), self._own.fixed(seed):
            return self.dataset[position]

    @property
    def __getitems__(self) -> Callable[[list[int]], Any] | None:
        """Makes the samples of a batch at once, where the dataset does so: DataLoaders and subsets ask for this."""
        whole = self.dataset
        while isinstance(whole, Subset):  # which has this whether or not its dataset does
            whole = whole.dataset
        return self._at_once if callable(getattr(whole, "__getitems__", None)) else None

    def _at_once(self, positions: list[int]) -> Any:
        with fixed_draws(positions[0]), self._own.fixed(positions[0]):
            return self.dataset.__getitems__(positions)


class FixedCall:
    """A function that draws the same at every call, such as a ``collate_fn`` that masks or mixes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._own = OwnGenerators(function)

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        with fixed_draws(0), self._own.fixed(0):
            return self.function(*args)


class FixedIteration:
    """A loader whose batches are the same at every iteration, whatever is drawn at random to choose and to make them.

    The process's generators are seeded again for every iteration. They, the loader's own and its
    state, if it has one, are put back afterwards. It ends at the loader's length, as a Trainer does: some loaders begin
    again there, or never end.

    Args:
        loader: the loader.
        like: the loader that it was made from, if it was: its state is then put back.
    """

    def __init__(self, loader: Any, like: Any = None) -> None:
        self.loader = without_persistent_workers(loader)
        self.like = self.loader if like is None else like
        self._own = OwnGenerators(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with self._state_kept():
            yield from self._batches()

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Put the state of a loader that has one back afterwards."""
        if not has_state(self.like):
            yield
            return
        before = loader_state(self.like)
        try:
            yield
        finally:
            load_loader_state(self.like, before)

    def _batches(self) -> Iterator[Any]:
        own = self._own
        with fixed_draws(0), own.kept():
            own.restore(own.initial)
            batches, state, states = iter(self.loader), random_state(), own.states()
        length = sized_len(self.loader)
        for _ in count() if length is None else range(length):
            with draws_put_back(), own.kept():
                set_state(state)
                own.restore(states)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                state, states = random_state(), own.states()
            yield batch
