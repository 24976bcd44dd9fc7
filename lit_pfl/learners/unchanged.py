"""A module put back as it was, after it has been tried or scored."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import is_
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lit_pfl.learners.logs import recorded
from lit_pfl_callbacks.tensors import copied, evaluating, load_tensors, tensor_of


@contextmanager
def holding(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters of a module other values, by name, and their own back afterwards."""
    with put_back(module, parameters):
        load_tensors(module, parameters)
        yield


@contextmanager
def put_back(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give some parameters and buffers of a module their values back afterwards."""
    own = copied({name: tensor_of(module, name).detach() for name in names})
    try:
        yield
    finally:
        load_tensors(module, own)


def unchanged(module: nn.Module, parts: bool = True) -> AbstractContextManager[None]:
    """Put a module and its parts back afterwards: their tensors, hidden states, caches, counters, metrics.

    What changes inside is undone too: of tensors, also those in dicts, as parameters and buffers are; of lists and
    dicts. Plain attributes are in no checkpoint, so a resumed run would not have what an evaluation leaves behind.

    Args:
        module: the module.
        parts: whether the modules in it are put back too.
    """
    return _as_they_were([*module.modules()] if parts else [module])


@contextmanager
def without_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Take the gradients of some weights away, and give them back afterwards."""
    gradients = [(weight, weight.grad) for weight in weights]
    for weight, _ in gradients:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient


@contextmanager
def without_trace(learner: L.LightningModule) -> Iterator[None]:
    """Let a learner take steps in evaluation mode that leave it as it was and log nothing."""
    with evaluating(learner), unchanged(learner), recorded(learner):
        yield


@contextmanager
def unseen(learner: L.LightningModule) -> Iterator[None]:
    """Tell nobody what a learner logs, and leave its metrics as they are; the rest of it changes as ever."""
    metrics = [part for part in learner.modules() if isinstance(part, Metric)]
    with _as_they_were(metrics), recorded(learner):
        yield


@contextmanager
def _as_they_were(parts: Sequence[nn.Module]) -> Iterator[None]:
    before = [(part.__dict__, part.__dict__.copy()) for part in parts]
    values = [value for _, attributes in before for value in attributes.values()]
    # not by their own copy(): a dict of a library may be made otherwise
    inside = [(x, dict(x) if isinstance(x, dict) else [*x]) for x in values if isinstance(x, list | dict)]
    in_dicts = (value for _, content in inside if isinstance(content, dict) for value in content.values())
    tensors = {id(x): x for x in chain(values, in_dicts) if isinstance(x, Tensor) and not is_lazy(x)}
    held = [_Held(tensor) for tensor in tensors.values()]
    try:
        yield
    finally:
        for attributes, former in before:
            attributes.clear()
            attributes.update(former)
        for value, content in inside:
            if _is_as_it_was(value, content):
                continue  # it may refuse to be changed, as a dict of options does
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)
        for one in held:
            one.put_back()


def _is_as_it_was(value: list[Any] | dict[Any, Any], content: list[Any] | dict[Any, Any]) -> bool:
    parts = (chain(x, x.values()) if isinstance(x, dict) else x for x in (value, content))
    return len(value) == len(content) and all(map(is_, *parts))


class _Held:
    """A tensor's memory and what is in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.memory = tensor, tensor.detach()
        self.content = self.memory.clone()
        # others, sparse ones for instance, cannot be compared; they count their changes, but not those by way of .data
        self.is_plain = tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
        self.version = None if self.is_plain or tensor.is_inference() else tensor._version

    def put_back(self) -> None:
        """Write what has changed, in place: optimizers and views know the tensor, and the memory."""
        if self.is_plain:
            if not torch.equal(self.memory, self.content):
                self.memory.copy_(self.content)
            if not self.tensor.is_set_to(self.memory):  # somebody has assigned to .data
                self.tensor.data = self.memory
        elif self.version is not None and self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.content)
