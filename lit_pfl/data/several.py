"""Several loaders that a client is scored on, as a Trainer takes them for validation and for tests."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_flatten  # as Lightning does

from lit_pfl.data.fixed import without_persistent_workers
from lit_pfl.errors import ConfigError


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
        loaders = given.flattened
    elif isinstance(given, dict | list | tuple):
        loaders = tree_flatten(given)[0]
    else:
        return () if given is None else given
    for loader in loaders:
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__") or isinstance(loader, str):
            raise ConfigError(f"its {name} returns a {type(loader).__name__} among its loaders; give DataLoaders.")
    return SeveralLoaders(loaders) if len(loaders) > 1 else loaders[0] if loaders else ()


def loaders_in(batches: Any) -> list[Any]:
    """Return the loaders that are scored one after the other."""
    return batches.loaders if isinstance(batches, SeveralLoaders) else [batches]
