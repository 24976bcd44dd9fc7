"""Callbacks that a module contains, as a library has its metrics: what they do in scoring is the module's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.learners.forward import with_methods
from lit_pfl.learners.handing_on import call_hook


def callbacks_in(learner: L.LightningModule) -> list[L.Callback]:
    """Return those callbacks of a module's ``configure_callbacks`` that are modules within it."""
    parts = {id(part) for part in learner.modules() if isinstance(part, L.Callback)}
    if not parts:
        return []
    given = call_hook(learner, "configure_callbacks")
    return [one for one in (given if isinstance(given, Sequence) else [given]) if id(one) in parts]


@contextmanager
def with_callbacks(learner: L.LightningModule) -> Iterator[Callable[..., None]]:
    """Let these callbacks log as the learner does; give what calls a hook of theirs, and then the learner's.

    A learner that no Trainer has seen is asked alone.
    """
    trainer = learner._trainer
    callbacks = [] if trainer is None else callbacks_in(learner)

    def tell(hook: str, *args: Any) -> None:
        for callback in callbacks:
            getattr(callback, hook)(trainer, learner, *args)
        if is_overridden(hook, learner):
            call_hook(learner, hook, *args)

    with ExitStack() as stack:
        for callback in callbacks:
            stack.enter_context(with_methods(callback, log=learner.log, log_dict=learner.log_dict))
        yield tell
