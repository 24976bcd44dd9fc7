"""What clients and federations have in common as LightningModules."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from lit_pfl.errors import ConfigError

M = TypeVar("M", bound=L.LightningModule)


class QuickModule(L.LightningModule):
    """A LightningModule that a Trainer gets through its hooks faster.

    A Trainer notes the hook it is in, a plain string, some 40 times a batch. Past ``torch.nn.Module``'s look-up of
    parameters that takes a fifth of the time: a tenth of a step of a small network.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, and takes no time for it: a Trainer asks its profiler some 30 times a batch."""

    nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context that does nothing."""
        return self.nothing


def own_copy(module: M) -> M:
    """Return a copy that shares nothing with the module but factories, which may hold all of a command line's parser.

    Args:
        module: a module; a Trainer that has it already is the copy's too. Whatever it made in its ``__init__`` is
            copied: sets, tensors, loss modules, metrics.

    Raises:
        ConfigError: when it holds something that cannot be copied.
    """
    made = module.__class__.__new__(module.__class__)
    known: dict[int, Any] = {id(module): made, id(module._trainer): module._trainer}
    known |= {id(factory): factory for factory in _factories(module.__dict__)}
    # what a module has computed and keeps, an embedding for instance: without its graph, which cannot be copied
    kept = (value for part in module.modules() for value in part.__dict__.values())
    known |= {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
    own: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        try:
            own[name] = copy.deepcopy(value, known)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{type(module).__name__}.{name}: every client needs one of its own, and a {type(value).__name__} "
                f"cannot be copied ({error}); make it in configure_state()."
            ) from None
    made.__dict__ = own
    return made


def _factories(value: Any) -> Iterator[Any]:
    """Return the factories in nested containers; functions and classes are never copied anyway."""
    if isinstance(value, partial):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _factories(part)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _factories(part)
