"""Samples and batches that are made the same every time, whatever is drawn at random to make them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, Dataset

from lit_pfl.randomness import fixed_draws, random_state, set_state
from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.loader_state import has_state, load_loader_state, loader_state
from lit_pfl_callbacks.random_state import draws_put_back


def without_persistent_workers(loader: Any) -> Any:
    """Return a DataLoader like one whose worker processes outlive an epoch, whose own end with it.

    Their random numbers run on from epoch to epoch, and nobody could restore them; every client would have some.
    """
    if not (isinstance(loader, DataLoader) and loader.persistent_workers):
        return loader
    other = copy.copy(loader)
    vars(other).update(persistent_workers=False, _iterator=None)  # which the loader lets nobody set
    return other


class FixedDraws(Dataset):
    """A dataset whose sample i is the same every time, whatever the dataset draws at random to make it.

    A batch of samples, where the dataset takes a list of their numbers, is fixed by the first of them.
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
