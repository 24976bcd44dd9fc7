"""What happens to a batch between its loader and the model: the hooks that a data module and a learner share."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

BatchHook = Literal["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
#: in the order in which a Trainer calls them
BATCH_HOOKS: tuple[BatchHook, ...] = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_hook(name: BatchHook, module: L.LightningDataModule | None, learner: L.LightningModule) -> Callable[..., Any]:
    """Return who is called at a batch hook, as a Trainer chooses: the data module if it overrides it, else the learner.

    A data module may change a dict or a list in place, as torchgeo's does, which deletes what is not a tensor. It gets
    a copy of those, not of what is inside, since a client's example batch is handed on again and again.

    Args:
        name: the hook.
        module: the client's data module, see :class:`~lit_pfl.data.ClientData`; None if it has none.
        learner: the client's learner.

    Example:
        >>> batch_hook("on_after_batch_transfer", None, L.LightningModule())([1, 2], 0)
        [1, 2]
    """
    if module is None or not is_overridden(name, module, L.LightningDataModule):
        return getattr(learner, name)
    return partial(_with_own_batch, getattr(module, name))


def _with_own_batch(hook: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
    return hook(copy.copy(batch) if isinstance(batch, dict | list) else batch, *arguments)
