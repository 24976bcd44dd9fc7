"""Give a training loader the state back that Lightning has saved of it."""

from itertools import islice
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.random_state import draws_put_back


def has_state(loader: Any) -> bool:
    """Say whether a loader has a state, as those of litdata and ``torchdata.stateful_dataloader`` do.

    Those of ``torchdata.nodes``, which are no DataLoaders, draw random numbers again for an epoch that is over.
    """
    return isinstance(loader, DataLoader) and isinstance(loader, _Stateful)


def loader_state(loader: Any) -> dict[str, Any]:
    """Return a loader's state, without drawing random numbers, and leave it in that state."""
    with draws_put_back(), OwnGenerators(loader).kept():
        state: dict[str, Any] = loader.state_dict()
    load_loader_state(loader, state)  # some have begun an epoch, of which the draws are put back
    return state


def load_loader_state(loader: Any, state: dict[str, Any]) -> None:
    """Give a loader its state back, without drawing random numbers.

    Raises:
        MisconfigurationException: when it does not take the state, as with another number of workers.
    """
    try:
        with draws_put_back(), OwnGenerators(loader).kept():
            loader.load_state_dict(state)
            iter(loader)  # some see only now that an epoch is over, and draw for the next one a second time then
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MisconfigurationException(
            f"The training loader does not take the state that the checkpoint has of it; give the loader of the run "
            f"that wrote it. {reason}"
        ) from error


def load_loader_states(loop: _FitLoop) -> None:
    """Give the loaders of a fit that resumes at an epoch's end their states back, which Lightning does not.

    Raises:
        MisconfigurationException: when one does not take its state.
    """
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    with_state: list[Any] = [one for one in loaders if isinstance(one, _Stateful)]
    for loader, state in zip(with_state, states, strict=False):
        if has_state(loader):
            load_loader_state(loader, state)
            with draws_put_back(), OwnGenerators(loader).kept():
                none = not [*islice(loader, 1)]
            if not none:  # MosaicML's loader makes an empty epoch after such a state, which is over then
                load_loader_state(loader, state)
