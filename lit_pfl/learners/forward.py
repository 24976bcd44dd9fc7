"""Methods of a learner, replaced for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning as L


@contextmanager
def with_methods(learner: Any, **others: Any) -> Iterator[None]:
    """Give a learner, or a callback, other methods; what it had of its own in their places is put back afterwards."""
    before = {name: learner.__dict__[name] for name in others if name in learner.__dict__}
    learner.__dict__.update(others)
    try:
        yield
    finally:
        for name in others:
            del learner.__dict__[name]
        learner.__dict__.update(before)


def forward_changed(learner: L.LightningModule, change: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let a learner's ``forward`` return something else, whether its steps call ``self(x)`` or ``self.forward(x)``.

    Args:
        learner: the learner.
        change: is given what ``forward`` returned, and the arguments that it had; returns what it is to return.
    """
    forward = learner.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs), *args, **kwargs)

    return with_methods(learner, forward=changed)
