"""An optimizer's step without the label that it has for PyTorch's profiler.

That label and the one of ``zero_grad`` take 0.03 ms a batch, a twelfth of the time of a small network's; where a
convolution has filled the processor's caches with something else, 0.2 ms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

#: what PyTorch has made of the ``step`` of a class whose optimizers are made
LABELLED = Optimizer.profile_hook_step(lambda: None).__code__
ZERO_GRAD = Optimizer.zero_grad


def take_step(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, or what is in it besides its label and hooks, if nobody looks at these."""
    step = None if _somebody_looks(optimizer) else _without_label(type(optimizer))
    if step is None:
        optimizer.step()
    else:
        step(optimizer)


def drop_gradients(optimizer: Optimizer) -> None:
    """Call ``optimizer.zero_grad()``, or do what it does, if nobody looks at its label."""
    if _somebody_looks(optimizer) or type(optimizer).zero_grad is not ZERO_GRAD:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _somebody_looks(optimizer: Optimizer) -> bool:
    """Say whether a profiler is on, or somebody has hooked onto an optimizer, or replaced a method."""
    return bool(
        torch.autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or "step" in optimizer.__dict__  # as a scheduler does
        or "zero_grad" in optimizer.__dict__
    )


def _without_label(kind: type[Optimizer]) -> Callable[[Optimizer], object] | None:
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is LABELLED else None
