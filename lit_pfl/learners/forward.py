"""What a learner's ``forward`` returns, passed through a function for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L


@contextmanager
def forward_changed(learner: L.LightningModule, change: Callable[..., Any]) -> Iterator[None]:
    """Let a learner's ``forward`` return something else, whether its steps call ``self(x)`` or ``self.forward(x)``.

    Args:
        learner: the learner.
        change: is given what ``forward`` returned, and the arguments that it had; returns what it is to return.
    """
    forward, before = learner.forward, learner.__dict__.get("forward")

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs), *args, **kwargs)

    learner.__dict__["forward"] = changed
    try:
        yield
    finally:
        del learner.__dict__["forward"]
        if before is not None:
            learner.__dict__["forward"] = before
