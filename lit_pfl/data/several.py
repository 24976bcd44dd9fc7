"""Several loaders of a client, as a Trainer takes them: together to train on, one after the other to score on."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_flatten, tree_map  # as Lightning does
from torch.utils.data import DataLoader

from lit_pfl.data.fixed import without_persistent_workers
from lit_pfl.errors import ConfigError

#: how many batches a ``CombinedLoader`` makes of those of its loaders, by the modes in which a Trainer trains
BATCHES: dict[str, Callable[[Iterable[int]], int]] = {"max_size_cycle": max, "max_size": max, "min_size": min}


class LoadersTogether:
    """Loaders of which each batch has one, as a Trainer combines them to train on. To all else it makes whole batches.

    Args:
        given: loaders in lists or dicts, or a ``CombinedLoader``.

    Raises:
        ConfigError: for a ``CombinedLoader`` that takes its loaders one after the other.
    """

    def __init__(self, given: Any) -> None:
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
        if combined._mode not in BATCHES:
            raise ConfigError(
                f"its train_dataloader returns a CombinedLoader with mode={combined._mode!r}; give one of "
                f"{', '.join(BATCHES)}."
            )
        self.mode = combined._mode
        self.loaders = tree_map(without_persistent_workers, combined.iterables)

    def __len__(self) -> int:
        return BATCHES[self.mode](map(len, tree_flatten(self.loaders)[0]))

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, *_ in CombinedLoader(self.loaders, self.mode))


class SeveralLoaders:
    """Loaders that are scored one after the other, as by a Trainer. For all else they are one, with the batches of all.

    Args:
        loaders: two or more.
    """

    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = [*map(without_persistent_workers, loaders)]

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.loaders)


def training_loader(given: Any) -> Any:
    """Return what a module's ``train_dataloader`` has returned as one thing; ``()`` for nothing.

    Args:
        given: a loader, or several in lists, dicts or a ``CombinedLoader``.
    """
    loaders = _flat(given)
    named = isinstance(given, CombinedLoader | dict) and loaders  # so is what a batch of one loader has
    if (named or len(loaders) > 1) and all(isinstance(loader, DataLoader) for loader in loaders):
        return LoadersTogether(given)
    if isinstance(given, list | tuple) and len(given) == 1:
        [given] = given
    return () if given is None or (isinstance(given, list | tuple) and not given) else given


def scoring_loader(given: Any, name: str) -> Any:
    """Return what a module's ``val_dataloader`` or ``test_dataloader`` has returned as one thing; ``()`` for nothing.

    Args:
        given: a loader, or several in lists, dicts or a ``CombinedLoader``.
        name: of the method that has returned it.

    Raises:
        ConfigError: for a ``CombinedLoader`` that does not take its loaders one after the other, and for one of several
            that cannot be gone through again and again.
    """
    if isinstance(given, CombinedLoader):
        if given._mode != "sequential":
            raise ConfigError(
                f"its {name} returns a CombinedLoader with mode={given._mode!r}; give mode='sequential', or a list."
            )
    elif not isinstance(given, dict | list | tuple):
        return () if given is None else given
    loaders = _flat(given)
    for loader in loaders:
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__") or isinstance(loader, str):
            raise ConfigError(f"its {name} returns a {type(loader).__name__} among its loaders; give DataLoaders.")
    return SeveralLoaders(loaders) if len(loaders) > 1 else loaders[0] if loaders else ()


def _flat(given: Any) -> list[Any]:
    return given.flattened if isinstance(given, CombinedLoader) else tree_flatten(given)[0]


def loaders_in(batches: Any) -> list[Any]:
    """Return the loaders that are scored one after the other."""
    return batches.loaders if isinstance(batches, SeveralLoaders) else [batches]
