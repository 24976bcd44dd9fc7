"""How well a learner does, by its own steps."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_pfl.data.batches import described
from lit_pfl.data.several import loaders_in
from lit_pfl.errors import ConfigError, first_line
from lit_pfl.learners import (
    SkipBatch,
    Step,
    call_hook,
    call_step,
    call_with,
    recorded,
    size_of,
    training_loss,
    unchanged,
    without_gradients,
    without_trace,
)
from lit_pfl.learners.callbacks_in import with_callbacks
from lit_pfl.learners.collecting import warned_of_collecting
from lit_pfl.lightning_internals import in_hook, show_scores, told_evaluating

Split = Literal["val", "test"]
STAGES: dict[Split, str] = {"val": "validation", "test": "test"}
#: what a learner's Trainer says that it does
RUNNING: dict[Split, RunningStage] = {"val": RunningStage.VALIDATING, "test": RunningStage.TESTING}
#: what a batch meets between its loader and the model, in the order in which a Trainer calls them
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class Score:
    """How well a model does on some samples.

    Args:
        n: number of samples.
        values: every metric that the learner logs, by name; empty without samples.
        higher_is_better: of those metrics that say so.
        sizes: what else is reported of the model, such as its number of parameters, see :meth:`~lit_pfl.Client.sizes`.
        logged: the metrics by the names under which a Trainer would know them (``val_loss``, ``val_loss_epoch``).
    """

    n: int
    values: Mapping[str, float]
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)


def score(learner: L.LightningModule, batches: Iterable[Any], split: Split) -> Score:
    """Score a learner by its own ``validation_step`` or ``test_step``, outside of a Trainer's loops.

    What it logs there and in the hooks around it is what it is scored by. A learner without the one step is scored by
    the other, one with neither by the loss of its ``training_step``, in evaluation mode, if there is one for these
    samples. The learner is left as it was.

    Args:
        learner: the learner.
        batches: the samples.
        split: which of them: validation or test data.
    """
    stages = [STAGES[split], *(stage for stage in STAGES.values() if stage != STAGES[split])]
    stage = next((s for s in stages if is_overridden(f"{s}_step", learner)), None)
    if stage is None:
        taken = 0

        def counted() -> Iterator[Any]:
            nonlocal taken
            for batch in _to_length(batches):
                taken += 1
                yield batch

        try:
            with told_evaluating(learner, RUNNING[split], loaders_in(batches)):
                n, loss = mean_loss(learner, counted())
        except ConfigError:
            raise
        except Exception as error:
            if taken > 1 or "out of memory" in str(error):
                raise
            rank_zero_warn(
                f"{type(learner).__name__} has no {STAGES[split]}_step, and its training_step no loss for {split} data "
                f"({type(error).__name__}: {first_line(error)}), so it has no score."
            )
            return Score(0, {})
        return Score(n, {"loss": loss} if n else {})
    n = 0
    evaluated = _evaluated(learner, stage, RUNNING[split], loaders_in(batches))
    with evaluated, recorded(learner) as record, with_callbacks(learner) as tell:
        for hook in (f"on_{stage}_start", f"on_{stage}_epoch_start"):
            tell(hook)
        for batch, *numbers in _numbered(batches):
            batch = transferred(learner, batch, *numbers[1:])
            record.batch_size, record.loader = size_of(batch), numbers[1] if len(numbers) > 1 else None
            tell(f"on_{stage}_batch_start", batch, *numbers)
            outputs = call_step(learner, f"{stage}_step", batch, *numbers)
            tell(f"on_{stage}_batch_end", outputs, batch, *numbers)
            n += record.batch_size
        record.loader = None
        if not n:
            return Score(0, {})
        after = any(is_overridden(f"on_{stage}_{when}", learner) for when in ("epoch_end", "end"))
        if after and learner._trainer is not None:  # where these hooks look for what has been logged so far
            show_scores(learner._trainer, record.as_in_a_trainer(record.compute()))
        tell(f"on_{stage}_epoch_end")
        tell(f"on_{stage}_end")
        logged = record.compute()
        record.reset()
        return Score(n, record.as_scores(logged), record.directions, logged=record.as_in_a_trainer(logged))


def _to_length(batches: Iterable[Any]) -> Iterator[Any]:
    """Return as many batches as a Trainer takes: some loaders begin again at their length, or never end."""
    return islice(batches, sized_len(batches))


def _numbered(batches: Any) -> Iterator[Any]:
    """Yield every batch with what a Trainer's hooks get: its number, and that of its loader where there are several."""
    loaders = loaders_in(batches)
    for number, loader in enumerate(loaders):
        for index, batch in enumerate(_to_length(loader)):
            yield (batch, index, number) if len(loaders) > 1 else (batch, index)


def predictions(learner: L.LightningModule, batches: Iterable[Any]) -> list[Any]:
    """Return what a learner's ``predict_step`` gives for each batch; the learner is left as it was.

    Lightning's own hands the whole batch to ``forward``. Where that fails, it is handed the first part, the inputs.

    Raises:
        ConfigError: when it can do with neither.
    """
    found = []
    with _evaluated(learner, "predict", RunningStage.PREDICTING), with_callbacks(learner) as tell:
        tell("on_predict_start")
        tell("on_predict_epoch_start")
        for batch, *numbers in _numbered(batches):
            batch = transferred(learner, batch, *numbers[1:])
            tell("on_predict_batch_start", batch, *numbers)
            found.append(_predicted(learner, batch, *numbers))
            tell("on_predict_batch_end", found[-1], batch, *numbers)
        tell("on_predict_epoch_end")
        tell("on_predict_end")
    return found


def _predicted(learner: L.LightningModule, batch: Any, *numbers: int) -> Any:
    if is_overridden("predict_step", learner):
        return call_step(learner, "predict_step", batch, *numbers)
    try:
        return call_step(learner, "predict_step", batch, *numbers)
    except Exception as error:
        if isinstance(batch, list | tuple):
            with suppress(Exception):
                return call_step(learner, "predict_step", batch[0], *numbers)
        raise ConfigError(
            f"model.learner: forward of {type(learner).__name__} cannot do with a batch, {described(batch)}, to "
            f"predict from; give it a predict_step. {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _evaluated(
    learner: L.LightningModule, stage: str, running: RunningStage, loaders: list[Any] | None = None
) -> Iterator[None]:
    """Put a learner into the mode in which its Trainer would evaluate it; all of it is put back afterwards."""
    told = told_evaluating(learner, running, loaders)
    with torch.no_grad(), unchanged(learner), _options_unchanged(learner), told:
        hook = f"on_{stage}_model_eval"
        if is_overridden(hook, learner):  # as for dropout that draws
            call_hook(learner, hook)
        else:
            learner.eval()
        with warned_of_collecting(learner):
            yield
        if is_overridden(hook := f"on_{stage}_model_train", learner):
            call_hook(learner, hook)


@contextmanager
def _options_unchanged(learner: L.LightningModule) -> Iterator[None]:
    """Put the options of a learner's optimizers back: schedule-free ones note there which weights are in place."""
    optimizers = [] if learner._trainer is None else learner._trainer.optimizers
    before = [(group, group.copy()) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, options in before:
            group.clear()
            group.update(options)


def transferred(learner: L.LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return a batch as a Trainer hands it to a learner: on its device, after the hooks that it meets on the way.

    A hook of the client's own data module takes the place of the learner's, as in Lightning. Either may change a dict
    or a list in place, as torchgeo's does, which deletes what is not a tensor. It gets a copy of those, not of what is
    inside, since a client's example batch is handed on again and again.
    """
    data = getattr(learner._trainer, "datamodule", None)
    for name in BATCH_HOOKS:
        of_data = data is not None and is_overridden(name, data, L.LightningDataModule)
        if isinstance(batch, dict | list):
            batch = copy.copy(batch)
        device = [learner.device] if name == "transfer_batch_to_device" else []
        with in_hook(learner, name):
            batch = getattr(data if of_data else learner, name)(batch, *device, dataloader_idx)
    return batch


def gradients_at(
    learner: L.LightningModule,
    loss: Callable[[L.LightningModule, Any, int], Tensor],
    at: Callable[[], Mapping[str, Tensor]],
    batches: Iterable[Any],
    epochs: int = 1,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield a batch's loss at weights that are not the learner's own, and its gradients by name, in evaluation mode.

    The learner is left as it was once all batches are through; batches that it skips are left out.

    Args:
        learner: the learner.
        loss: gives the loss of a learner, a batch and its index.
        at: gives the weights for the next batch, by name in the learner.
        batches: not yet on the learner's device.
        epochs: how often to go through them.
    """
    with torch.inference_mode(False), torch.enable_grad(), without_trace(learner):
        for index, batch in chain.from_iterable(enumerate(batches) for _ in range(epochs)):
            weights = {name: weight.detach().requires_grad_() for name, weight in at().items()}
            named = {f"learner.{name}": weight for name, weight in weights.items()}
            with suppress(SkipBatch):
                value: Tensor = call_with(named, Step(learner, loss), transferred(learner, batch), index)
                gradients = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
                yield value, dict(zip(weights, gradients, strict=True))


def mean_loss(learner: L.LightningModule, batches: Iterable[Any]) -> tuple[int, float]:
    """Return the number of samples and the mean loss of ``training_step`` on them, in evaluation mode, NaN without any.

    The learner is left as it was; what it logs is not shown. Its step may take gradients, as adversarial training does.
    """
    n, total = 0, 0.0
    with without_trace(learner):
        for index, batch in enumerate(_to_length(batches)):
            batch = transferred(learner, batch)
            size = size_of(batch)
            if not size:
                continue  # Poisson sampling may draw nobody
            try:
                total += _loss(learner, batch, index) * size
            except SkipBatch:
                continue
            n += size
    return n, total / n if n else math.nan


def _loss(learner: L.LightningModule, batch: Any, index: int) -> float:
    """Return the loss, without gradients: they need memory. If the step takes some on the way, take it once more."""
    try:
        with torch.no_grad():
            return float(training_loss(learner, batch, index))
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
    with torch.inference_mode(False), torch.enable_grad(), without_gradients(learner.parameters()):
        return float(training_loss(learner, batch, index).detach())


def needs_loss(learner: L.LightningModule, batches: Iterable[Any], method: str) -> None:
    """Refuse a learner with manual optimization that returns no loss, for a method that compares losses.

    Raises:
        ConfigError: when it returns none on the first of some batches.
    """
    if not learner.automatic_optimization and not mean_loss(learner, islice(batches, 1))[0]:
        raise ConfigError(
            f"model.learner: training_step of {type(learner).__name__} returns no loss, and {method} compares losses; "
            "let it return one."
        )
