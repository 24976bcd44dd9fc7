"""Many fits in one process."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from lightning.fabric.utilities import registry


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let fits start or end without traces in the process.

    Every fit installs a SIGTERM handler that calls the one it found, and puts that back when it ends: a thousand fits
    inside one another's would call each other, and leave a dead one's behind. And every Trainer tells of its device,
    which the federation's own Trainer has done once.
    """
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():  # it is about metrics, which clients' Trainers do not write
            warnings.filterwarnings("ignore", message=r"The number of training batches .* logging interval")
            yield
    finally:
        logger.setLevel(level)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Let Trainers be made that look for other packages' callbacks as the process's first one did.

    A Trainer reads the lists of entry points of all packages, which may take several times as long as the rest of it.
    """
    names: dict[str, Any] = vars(registry)
    before = names.get("entry_points")
    if before is entry_points:
        names["entry_points"] = _entry_points
    try:
        yield
    finally:
        if before is entry_points:
            names["entry_points"] = before


@cache
def _entry_points(**which: str) -> Any:
    return entry_points(**which)
