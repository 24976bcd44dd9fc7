"""Save the process's random state in a checkpoint, and restore it."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch


def torch_state_kept() -> AbstractContextManager[None]:
    """Put PyTorch's default generators back afterwards: that of the CPU, and that of the GPU in use."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's default generators, as tensors and plain values.

    Those of CUDA devices are included once CUDA is in use.
    """
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    name, key, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(key.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned; with another number of CUDA devices, theirs stay as they are."""
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if len(state["cuda"]) == torch.cuda.device_count():
        for device, own in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(own.cpu(), device)


@contextmanager
def draws_put_back() -> Iterator[None]:
    """Put Python's, NumPy's and PyTorch's default generators back afterwards; not those of GPUs, which takes longer."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(pytorch)
