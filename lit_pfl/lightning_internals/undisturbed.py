"""Many fits in one process."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from lightning.fabric.accelerators.cuda import num_cuda_devices
from lightning.fabric.utilities import registry
from lightning.pytorch.accelerators import cuda as accelerators_cuda

#: what a Trainer handles; SIGUSR1 is SLURM's, by default
HANDLED = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let fits start or end without traces in the process.

    Every fit installs a SIGTERM handler that calls the one it found, and in the end puts all handlers back that it
    found: a thousand fits inside one another's would call each other, and leave a dead one's behind. And every Trainer
    tells of its device, which the federation's own Trainer has done once. Each change of a level clears the caches of
    all loggers in the process, so of nested contexts only the outer one changes it.
    """
    handlers = {signum: signal.getsignal(signum) for signum in HANDLED}
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    if talks := level < logging.WARNING:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        if talks:
            logger.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            for signum, handler in handlers.items():
                if handler is not None:
                    signal.signal(signum, handler)


@contextmanager
def signals_kept() -> Iterator[bool]:
    """Put the handlers of SIGTERM and SIGINT back in the end; say whether others can be set: in a main thread."""
    settable = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)} if settable else {}
    try:
        yield settable
    finally:
        for signum, handler in before.items():
            if handler is not None:  # of one that was not set from Python nothing is known
                signal.signal(signum, handler)


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Let Trainers be made that look for other packages' callbacks, and for GPUs, as the process's first one did.

    A Trainer reads the lists of entry points of all packages, which may take several times as long as the rest of it.
    Without a GPU it also tries twice to load NVIDIA's library.
    """
    with ExitStack() as held:
        for module, name, original, known in (
            (registry, "entry_points", entry_points, _entry_points),
            (accelerators_cuda, "num_cuda_devices", num_cuda_devices, _num_cuda_devices),
        ):
            if vars(module).get(name) is original:
                setattr(module, name, known)
                held.callback(setattr, module, name, original)
        yield


@cache
def _entry_points(**which: str) -> Any:
    return entry_points(**which)


@cache
def _num_cuda_devices() -> int:
    return num_cuda_devices()
