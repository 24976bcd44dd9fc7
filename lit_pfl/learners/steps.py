"""Calling a learner's steps as a Trainer would."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lit_pfl.errors import ConfigError
from lit_pfl.learners.logs import recorded
from lit_pfl.lightning_internals import in_hook


class SkipBatch(Exception):
    """A learner's ``training_step`` returned None: no step is taken on this batch."""


def call_step(learner: L.LightningModule, name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    """Call ``training_step`` or another step of a learner, with the arguments that it wants."""
    with in_hook(learner, name):
        further = (batch_idx, dataloader_idx)[: _further_arguments(type(learner), name)]  # type: ignore[arg-type]
        return getattr(learner, name)(batch, *further)


@cache
def _further_arguments(kind: Hashable, name: str) -> int:
    """Return how many of ``batch_idx`` and ``dataloader_idx`` a step takes beside the batch."""
    _, *parameters = inspect.signature(getattr(kind, name)).parameters.values()
    if any(p.name == "dataloader_iter" for p in parameters):
        raise ConfigError(f"{kind}.{name} takes a dataloader_iter; a client's learner takes batches.")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return 1 if many else min(len(positional), 3) - 1


def loss_of(outputs: Any) -> Tensor:
    """Return the loss in what a ``training_step`` returned.

    Raises:
        SkipBatch: when it returned None.
    """
    if outputs is None:
        raise SkipBatch
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs


def training_loss(learner: L.LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss that a learner's ``training_step`` gives for a batch.

    Raises:
        SkipBatch: when it returns None.
    """
    return loss_of(call_step(learner, "training_step", batch, batch_idx))


class Step(nn.Module):
    """A learner's loss as a forward pass, so that ``torch.func.functional_call`` gives it at other weights.

    The learner's tensors are named ``learner.<name>`` in it.

    Args:
        learner: the learner.
        loss: gives its loss from the learner, a batch and the batch's index.
    """

    def __init__(
        self, learner: L.LightningModule, loss: Callable[[L.LightningModule, Any, int], Tensor] = training_loss
    ) -> None:
        super().__init__()
        self.learner = learner
        self.loss = loss

    def forward(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self.learner, batch, batch_idx)


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor that has one, wherever that is.

    Tuples, lists, mappings and dataclasses are looked through in their order; what is no tensor is passed over, and
    without any tensor it is 1. So ``(x, y)`` and ``(names, x)`` have the length of x.

    But a list, or a tuple inside of something else, may have a sample in every place, and then as many as places. It
    has when its parts are

    * tensors of one type and number of dimensions, but of different lengths, or without one;
    * tuples of different things in a list, as ``collate_fn=list`` leaves samples (by itself a DataLoader never does);
    * tensors of one length, beside something else that has as many samples as there are of them: ``(images, targets)``
      of ``zip(*samples)`` has as many samples as images, and ``((x1, x2), y)`` the length of x1.

    Tensors of one length with nothing beside them are no samples, since two views of a batch look the same.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    # The first part of nearly all batches is a tensor, and this is asked of every batch: all else takes its time.
    if (kind := type(batch)) is tuple or kind is list:
        first = batch[0] if batch else None
        if isinstance(first, Tensor) and first.dim() and (kind is tuple or not _differ(batch)):
            return len(first)
    length = _length_of_parts(batch, outermost=True)
    return 1 if length is None else length


def _length(part: Any) -> int | None:
    """Return the number of samples of a part of a batch, None for one that tells of none."""
    if isinstance(part, Tensor):
        return len(part) if part.dim() else None
    return _length_of_parts(part)


def _length_of_parts(whole: Any, outermost: bool = False) -> int | None:
    parts = _parts(whole)
    if not (outermost and type(whole) is tuple) and _has_a_sample_in_every_place(whole):
        return len(parts)
    for part in parts:
        length = _length(part)
        if length is not None:
            beside = [other for other in parts if other is not part]
            return len(part) if _has_as_many_as_those(part, beside) else length
    return None


def _parts(whole: Any) -> Sequence[Any]:
    """Return what is in a tuple, list, mapping or dataclass; nothing of anything else."""
    if isinstance(whole, Mapping):
        return list(whole.values())
    if isinstance(whole, tuple | list):
        return whole
    if is_dataclass(whole) and not isinstance(whole, type):
        return [getattr(whole, field.name) for field in fields(whole)]
    return ()


def _is_sequence(whole: Any) -> bool:
    """Say whether this is a tuple or a list whose places are alike; a named tuple's are not."""
    return type(whole) in (tuple, list) and len(whole) > 0


def _has_a_sample_in_every_place(whole: Any) -> bool:
    if not _is_sequence(whole):
        return False
    if all(isinstance(part, Tensor) for part in whole):
        return _differ(whole) or not any(part.dim() for part in whole)
    return type(whole) is list and all(map(_is_record, whole))


def _is_record(whole: Any) -> bool:
    """Say whether this is a tuple of things of different kinds."""
    kinds = {(type(part), getattr(part, "dtype", None), getattr(part, "ndim", None)) for part in _parts(whole)}
    return type(whole) is tuple and len(kinds) > 1


def _differ(whole: Sequence[Any]) -> bool:
    """Say whether tensors are of one type and number of dimensions, but of different lengths."""
    first, *others = whole
    kind = first.dtype, first.dim()
    for other in others:  # not in one expression, which would take longer: this is asked of every batch
        if not isinstance(other, Tensor) or (other.dtype, other.dim()) != kind:
            return False
    return first.dim() > 0 and any(len(other) != len(first) for other in others)


def _has_as_many_as_those(part: Any, beside: list[Any]) -> bool:
    """Say whether a sequence of tensors of one length has as many places as what is beside it has samples."""
    if not _is_sequence(part) or not all(isinstance(tensor, Tensor) for tensor in part):
        return False
    of_one_length = len({_length(tensor) for tensor in part}) == 1
    return of_one_length and any(_samples_for_sure(other) == len(part) for other in beside)


def _samples_for_sure(part: Any) -> int | None:
    """Return the number of samples of a part where there is no doubt about it."""
    if isinstance(part, Tensor):
        return _length(part)
    if not _is_sequence(part):
        return None
    plain = all(isinstance(one, Mapping) or _length(one) is None for one in part)
    return len(part) if plain or _has_a_sample_in_every_place(part) else None


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Divide a batch into consecutive parts of equal size, up to one sample; one too small serves as all of them.

    Args:
        batch: tensors, in whatever they are held, that have its samples along their first dimension, and tuples and
            lists with a sample in every place. What has another length goes into every part as it is.
        parts: how many; each has at least two samples.
    """
    size = size_of(batch)
    if size < 2 * parts:
        return [batch] * parts
    places = torch.arange(size).tensor_split(parts)

    def part(index: int) -> Any:
        first, last = int(places[index][0]), int(places[index][-1]) + 1

        def cut(whole: Any) -> Any:
            if isinstance(whole, Tensor):
                return whole[first:last] if whole.dim() and len(whole) == size else whole
            in_places = _is_sequence(whole) and len(whole) == size
            if in_places and (_has_a_sample_in_every_place(whole) or all(_length(one) != size for one in whole)):
                return whole[first:last]
            inside = [apply_to_collection(value, (Tensor, tuple, list), cut) for value in whole]
            return type(whole)(*inside) if hasattr(whole, "_fields") else type(whole)(inside)

        return apply_to_collection(batch, (Tensor, tuple, list), cut)

    return [part(index) for index in range(parts)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and back, every part as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put the plain attributes of a module and its parts back afterwards: hidden states, caches, counters, metrics.

    They are in no checkpoint, so a resumed run would not have what an evaluation leaves behind.
    """
    before = [(part.__dict__, part.__dict__.copy()) for part in module.modules()]
    inside = [(value, _content(value)) for _, attributes in before for value in attributes.values()]
    try:
        yield
    finally:
        for attributes, former in before:
            attributes.clear()
            attributes.update(former)
        for value, content in inside:
            _put_back(value, content)


@contextmanager
def unseen(learner: L.LightningModule) -> Iterator[None]:
    """Tell nobody what a learner logs, and leave its metrics as they are; the rest of it changes as ever."""
    with ExitStack() as stack:
        for part in learner.modules():
            if isinstance(part, Metric):
                stack.enter_context(unchanged(part))
        stack.enter_context(recorded(learner))
        yield


def _content(value: Any) -> Any:
    """Return a copy of what may change inside a tensor, list or dict without being replaced by another one."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict) else None


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(value, content):
            value.detach().copy_(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict):
        value.clear()
        value.update(content)
