"""The process's random state, as tensors and plain values, goes into checkpoints and is put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's default generators, on the GPUs too if they are in use."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    name, key, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(key.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Make what :func:`random_state` returned the process's state; on other GPUs than then, theirs stays."""
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if len(state["cuda"]) == torch.cuda.device_count():
        for device, own in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(own.cpu(), device)


class ResumedDraws:
    """Lets a fit that resumes from a round's end draw what it would have drawn.

    A fit that goes on loads a reply and begins its next epoch's batches then; one that resumes has begun them before
    the reply comes. Hence two states: as it was when the reply was loaded, and afterwards.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def keep(self) -> None:
        """A reply is about to be loaded."""
        self._before = random_state()

    def forget(self) -> None:
        """What is saved from now on is not of a round's end."""
        self._before, self._saved = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of a round's end holds, of any other one nothing."""
        return {"random": {"before": self._before, "after": random_state()}} if self._before else {}

    def load(self, saved: dict[str, Any]) -> None:
        """Take note of what a checkpoint holds."""
        self._saved = saved

    def begin(self) -> None:
        """Before a fit that resumes begins its batches."""
        if self._saved:
            set_random_state(self._saved["after"])

    def begun(self) -> dict[str, Any]:
        """Return the state after that, if there is one."""
        return random_state() if self._saved else {}

    @contextmanager
    def loading(self, begun: dict[str, Any]) -> Iterator[None]:
        """Load the first reply of a fit, with what :meth:`begun` returned before it waited for that."""
        if begun:
            set_random_state(self._saved["before"])
        yield
        if begun:
            set_random_state(begun)
