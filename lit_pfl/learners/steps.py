"""Calling a learner's steps as a Trainer would."""

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torchmetrics import Metric

from lit_pfl.data.batches import parts_of, plain, tensors_in
from lit_pfl.errors import ConfigError
from lit_pfl.learners.logs import recorded
from lit_pfl.lightning_internals import in_hook, optimizers_and_schedules
from lit_pfl_callbacks.tensors import evaluating, load_tensors


class SkipBatch(Exception):
    """A learner's ``training_step`` returned None: no step is taken on this batch."""


def call_step(learner: L.LightningModule, name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    """Call ``training_step`` or another step of a learner, with the arguments that it wants."""
    with in_hook(learner, name):
        further = (batch_idx, dataloader_idx)[: _further_arguments(type(learner), name)]  # type: ignore[arg-type]
        return getattr(learner, name)(batch, *further)


@cache
def _further_arguments(kind: Hashable, name: str) -> int:
    """Return how many of ``batch_idx`` and ``dataloader_idx`` a step takes next to the batch."""
    _, *parameters = inspect.signature(getattr(kind, name)).parameters.values()
    if any(p.name == "dataloader_iter" for p in parameters):
        raise ConfigError(f"{kind}.{name} takes a dataloader_iter; a client's learner takes batches.")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return 1 if many else min(len(positional), 3) - 1


def training_loss(learner: L.LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss that a learner's ``training_step`` gives for a batch; see :func:`training_outputs`."""
    return training_outputs(learner, batch, batch_idx)[0]


def training_outputs(
    learner: L.LightningModule, batch: Any, batch_idx: int, keep: bool = True
) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss that a learner's ``training_step`` gives for a batch, and the dict that it is in, if it is.

    Args:
        learner: the learner.
        batch: the batch.
        batch_idx: its index.
        keep: whether the batch stays as it is, for whoever needs it again: a step may change it in place, as timm's
            ``Mixup`` does.

    Raises:
        SkipBatch: when it returns None.
        ConfigError: when it returns something else that is not a loss.
    """
    if keep:
        batch = own_batch(batch)
    if learner.automatic_optimization:
        outputs = call_step(learner, "training_step", batch, batch_idx)
    else:
        with _without_steps(learner):
            outputs = call_step(learner, "training_step", batch, batch_idx)
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            outputs = None
    if outputs is None:
        raise SkipBatch
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        if isinstance(outputs, Mapping):
            what = f"a dict with {what} as its 'loss'" if "loss" in outputs else "a dict without a 'loss'"
        raise ConfigError(
            f"model.learner: its training_step returns {what}; it must return the loss as a tensor of one number, a "
            "dict with that as its 'loss', or None to skip the batch."
        )
    return plain(loss), outputs if isinstance(outputs, Mapping) else {}


@runtime_checkable
class _Clones(Protocol):
    """A tensor, a graph of PyTorch Geometric, a TensorDict."""

    def clone(self) -> Any: ...


def own_batch(batch: Any) -> Any:
    """Return a copy of a batch of which tensors, dicts and lists may be changed in place."""
    if type(batch) in (tuple, list) and all(type(part) is Tensor for part in batch):  # nearly always, and quicker
        return type(batch)([part.clone() for part in batch])
    return apply_to_collection(batch, _Clones, lambda part: part.clone())


class _NoOptimizer:
    """What a learner with manual optimization gets for an optimizer where its loss is only looked at."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass

    @contextmanager
    def toggle_model(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


class _NoSchedule:
    """What such a learner gets for a schedule."""

    def __init__(self, schedule: Any) -> None:
        self.last_epoch, self._rates = schedule.last_epoch, schedule.get_last_lr()

    def step(self, *_: Any, **__: Any) -> None:
        pass

    def get_last_lr(self) -> Any:
        return self._rates


@contextmanager
def _without_steps(learner: L.LightningModule) -> Iterator[None]:
    """Let a learner with manual optimization compute its losses without any step."""
    optimizers, schedules = optimizers_and_schedules(learner)
    given = [_NoOptimizer(one) for one in optimizers], [_NoSchedule(one) for one in schedules]

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def as_lightning_does(several: Sequence[Any]) -> Callable[..., Any]:
        return lambda *_, **__: several[0] if len(several) == 1 else list(several) or None

    instead = {
        "optimizers": as_lightning_does(given[0]),
        "lr_schedulers": as_lightning_does(given[1]),
        **dict.fromkeys(("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"), nothing),
    }
    before = {name: learner.__dict__[name] for name in instead if name in learner.__dict__}
    learner.__dict__.update(instead)
    try:
        yield
    finally:
        for name in instead:
            del learner.__dict__[name]
        learner.__dict__.update(before)


class Step(nn.Module):
    """A learner's loss as a forward pass, so that :func:`call_with` gives it at other weights.

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


def call_with(tensors: Mapping[str, Tensor], module: nn.Module, *inputs: Any) -> Any:
    """Return a module's output with other tensors instead of its own, wherever these are used.

    In a part that has two names, as by ``self.head = self.net[2]``, :func:`torch.func.functional_call` would leave the
    others behind: it gives back under the second name what it finds there, which is what it has put there under the
    first. So each place is named once here.

    Args:
        tensors: the others, by the names of those that they stand for.
        module: the module.
        inputs: what its ``forward`` is given.
    """
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    others = {id(own): tensors[name] for name, own in named if name in tensors}
    places = {
        f"{path}.{leaf}".lstrip("."): others[id(own)]
        for path, part in module.named_modules()
        for leaf, own in (*part._parameters.items(), *part._buffers.items())
        if id(own) in others
    }
    return functional_call(module, places, inputs, tie_weights=False)


def _lengths(part: Any) -> Iterator[int]:
    """Return the lengths of all tensors in a part of a batch, but of those without dimensions."""
    return (len(tensor) for tensor in tensors_in(part) if tensor.dim())


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Divide a batch into consecutive parts of equal size, up to one sample; one too small serves as all of them.

    Args:
        batch: tensors, in whatever they are held, that have its samples along their first dimension; lists of as many
            things without a length, such as names, are divided too. A tensor without dimensions goes with every part.
        parts: how many; each has at least two samples.

    Raises:
        ConfigError: when it holds what cannot be divided so.
    """
    lengths = dict.fromkeys(_lengths(batch))
    size = next(iter(lengths), 1)
    _check_divides(batch, size)
    if len(lengths) > 1:
        raise ConfigError(
            f"A batch has tensors of {' and '.join(map(str, lengths))} rows, and this method divides batches into "
            "samples: give every tensor one row a sample."
        )
    if size < 2 * parts:
        return [batch] * parts
    places = [places.tolist() for places in torch.arange(size).tensor_split(parts)]

    def part(index: int) -> Any:
        def cut(x: Tensor | list[Any]) -> Any:
            if isinstance(x, Tensor):
                return x.tensor_split(parts)[index] if x.dim() else x
            if _is_of_samples(x, size):
                return [x[place] for place in places[index]]
            return [apply_to_collection(inside, (Tensor, list), cut) for inside in x]

        return apply_to_collection(batch, (Tensor, list), cut)

    return [part(index) for index in range(parts)]


def _is_of_samples(part: Any, size: int) -> bool:
    """Say whether a part of a batch is a list with something for each sample."""
    return isinstance(part, list) and len(part) == size and next(_lengths(part), None) is None


def _check_divides(part: Any, size: int) -> None:
    """Refuse what has samples, or may have them, in an order that nobody here knows."""
    if isinstance(part, Tensor) or _is_of_samples(part, size):
        return
    if isinstance(part, PackedSequence) or _is_closed(part):
        raise ConfigError(
            f"A batch has a {type(part).__name__} in it, and this method divides batches into samples: give the "
            "tensors that it is made of, with one row a sample, and make it in the learner's steps."
        )
    for inside in parts_of(part):
        _check_divides(inside, size)


def _is_closed(part: Any) -> bool:
    """Say whether something may hold samples where batches are not looked through: an array, a set, a graph."""
    if isinstance(part, str | bytes | Mapping | tuple | list) or is_dataclass(part):
        return False
    tensors = any(isinstance(value, Tensor) for value in getattr(part, "__dict__", {}).values())
    return tensors or hasattr(part, "to") or isinstance(part, Collection)


@contextmanager
def holding(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters of a module other values, by name, and their own back afterwards."""
    own = {name: module.get_parameter(name).detach().clone() for name in parameters}
    load_tensors(module, parameters)
    try:
        yield
    finally:
        load_tensors(module, own)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put a module and its parts back afterwards: their tensors, hidden states, caches, counters, metrics.

    What changes inside is undone too: of tensors, also those in dicts, as parameters and buffers are; of lists and
    dicts. Plain attributes are in no checkpoint, so a resumed run would not have what an evaluation leaves behind.
    """
    with _as_they_were([*module.modules()]):
        yield


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
    inside = [(value, value.copy()) for value in values if isinstance(value, list | dict)]
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
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)
        for one in held:
            one.put_back()


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
