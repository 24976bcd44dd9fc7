"""A training loader that is not asked for batches before a client's fit has begun."""

from collections.abc import Iterator
from typing import Any

from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.loader_state import has_state, load_loader_state
from lit_pfl_callbacks.random_state import random_state, set_random_state


class LateLoader:
    """A loader that begins an epoch when the first batch is asked for.

    A Trainer makes the iterator of a fit's first epoch before the fit begins, and those of later epochs as they come. A
    DataLoader's iterator draws a seed when it is made, so a fit that is resumed at a later epoch would draw one number
    fewer than one that was never interrupted.

    Args:
        loader: the loader, whose attributes are this one's too.

    Attributes:
        waits: whether it makes no batches for the time being. Of loaders without a length Lightning fetches one ahead,
            the first before a client has joined, and a stream that counts its iterations would count that.
    """

    waits = False

    def __new__(cls, loader: Any = None) -> "LateLoader":
        """Make one that Lightning sees to have a state where the loader has."""
        return super().__new__(_WithState if has_state(loader) else cls)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if not self.waits:
            yield from self.loader

    def __getattr__(self, name: str) -> Any:
        # of a copy that is still being made; of a loader whose state is not saved
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class _WithState(LateLoader):
    _loaded = False

    def __iter__(self) -> Iterator[Any]:
        if self.waits or not self._loaded:
            yield from super().__iter__()
            return
        self._loaded = False
        own, before, none = OwnGenerators(self.loader), random_state(), True
        states = own.states()
        for batch in self.loader:
            none = False
            yield batch
        if none:  # MosaicML's loader makes an empty epoch after the state of an epoch's end
            set_random_state(before)
            own.restore(states)
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_loader_state(self.loader, state_dict)
        self._loaded = True
