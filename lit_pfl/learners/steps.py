"""Calling a learner's steps as a Trainer would."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call

from lit_pfl.data.batches import plain
from lit_pfl.errors import ConfigError
from lit_pfl.learners.forward import with_methods
from lit_pfl.lightning_internals import in_hook, optimizers_and_schedules

#: an attribute of one of several learners of a client: whether its ``training_step`` has been called in this epoch
TRAINED = "_training_step_called"


class SkipBatch(Exception):
    """A learner's ``training_step`` returned None: no step is taken on this batch."""


def call_step(learner: L.LightningModule, name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    """Call ``training_step`` or another step of a learner, with the arguments that it wants."""
    if name == "training_step" and TRAINED in learner.__dict__:
        learner.__dict__[TRAINED] = True
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
        SkipBatch: when it returns None, or the batch is None, as of a ``collate_fn`` that has dropped all samples.
        ConfigError: when it returns something else that is not a loss.
    """
    if batch is None:
        raise SkipBatch
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
    number = plain(loss)
    return number.reshape(()) if number.dim() else number, outputs if isinstance(outputs, Mapping) else {}


@runtime_checkable
class _Clones(Protocol):
    """A tensor, a graph of PyTorch Geometric, a TensorDict."""

    def clone(self) -> Any: ...


def own_batch(batch: Any) -> Any:
    """Return a copy of a batch of which tensors, dicts and lists may be changed in place."""
    if type(batch) in (tuple, list) and all(type(part) is Tensor for part in batch):  # nearly always, and quicker
        return type(batch)([part.clone() for part in batch])
    return apply_to_collection(batch, _Clones, lambda part: part.clone())


class _NoOptimizer(LightningOptimizer):
    """What a learner with manual optimization gets for an optimizer where its loss is only looked at.

    An instance of the optimizer's class too, as Lightning's are.
    """

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
        self.last_epoch, self._rates = getattr(schedule, "last_epoch", None), schedule.get_last_lr()

    def step(self, *_: Any, **__: Any) -> None:
        pass

    def get_last_lr(self) -> Any:
        return self._rates


def _without_steps(learner: L.LightningModule) -> AbstractContextManager[None]:
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
    return with_methods(learner, **instead)


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


def call_with(tensors: Mapping[str, Tensor], module: nn.Module, *inputs: Any, keeps: bool = False) -> Any:
    """Return a module's output with other tensors instead of its own, wherever these are used.

    In a part that has two names, as by ``self.head = self.net[2]``, :func:`torch.func.functional_call` would leave the
    others behind: it gives back under the second name what it finds there, which is what it has put there under the
    first. So each place is named once here.

    Args:
        tensors: the others, by the names of those that they stand for.
        module: the module.
        inputs: what its ``forward`` is given.
        keeps: whether the module must change these tensors in place only.

    Raises:
        ConfigError: when it ``keeps`` them, and has put another tensor in the place of one.
    """
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    others = {id(own): tensors[name] for name, own in named if name in tensors}
    places = {
        f"{path}.{leaf}".lstrip("."): others[id(own)]
        for path, part in module.named_modules()
        for leaf, own in (*part._parameters.items(), *part._buffers.items())
        if id(own) in others
    }
    given = dict(places) if keeps else {}
    output = functional_call(module, places, inputs, tie_weights=False)  # which notes in places what has been assigned
    if assigned := [place for place, tensor in given.items() if places[place] is not tensor]:
        raise ConfigError(f"{min(assigned)} is assigned in a step instead of changed in place")
    return output
