"""A Trainer calls the hooks of the module that it is given: a client, which hands them on to its learner."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.learners.logs import silenced
from lit_pfl.learners.steps import TRAINED, call_step
from lit_pfl.lightning_internals import in_hook, saved_hparams

STAGES = ("validation", "test", "predict")
#: hooks that tell something; where a client has one too, both are called, the client's first
TOLD = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "setup", "teardown",
    *(f"on_{stage}_{when}" for stage in STAGES
      for when in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval",
                   "model_train")),
)  # fmt: skip
#: hooks that do something, or return it: the learner's takes the place of Lightning's, but not of the method's
DONE = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward",
    "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step", "configure_gradient_clipping",
)  # fmt: skip
#: hooks about checkpoints, in which every learner has a place of its own
KEPT = ("on_save_checkpoint", "on_load_checkpoint")
#: hooks that get data; where the data comes from elsewhere, as in a federation, nobody calls them
DATA = ("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def hand_on(
    client: L.LightningModule,
    learners: Mapping[str, L.LightningModule],
    scored: L.LightningModule,
    base: type[L.LightningModule],
    data: bool,
) -> None:
    """Make a client hand on those hooks that its learners override; the others stay as absent as they were.

    Args:
        client: the module that the Trainer knows.
        learners: the learner, and further ones of the same kind, by their names in the client. What those log in
            training is not shown: it would be under the same names.
        scored: the one of them that is evaluated.
        base: the client's own base class; hooks of classes below it are a method's.
        data: whether hooks that get data are handed on too.
    """
    first, *_ = every = list(learners.values())
    for learner in every if len(every) > 1 else ():
        learner.__dict__[TRAINED] = False
    for hook in (*TOLD, *DONE, *(DATA if data else ())):
        if not is_overridden(hook, first):
            continue
        own = getattr(client, hook) if is_overridden(hook, client) else None
        if hook not in TOLD:
            if own is None or not is_overridden(hook, client, base):
                client.__dict__[hook] = _handing_on(hook, None, [first])
        else:
            evaluation = any(hook.startswith(f"on_{stage}_") for stage in STAGES)
            client.__dict__[hook] = _handing_on(hook, own, [scored] if evaluation else every)
    if any(is_overridden(hook, first) for hook in KEPT):
        for hook in KEPT:
            if not is_overridden(hook, client, base):
                client.__dict__[hook] = _keeping(hook, learners)
    client.__dict__["on_train_epoch_end"] = _once_an_epoch(client, client.on_train_epoch_end)


def hand_on_evaluation(
    client: L.LightningModule,
    scored: L.LightningModule,
    personalized: Callable[[], AbstractContextManager[L.LightningModule]],
) -> None:
    """Make a client evaluate by those of its learner's own steps that it has.

    Args:
        client: the module that the Trainer knows.
        scored: the learner that is evaluated.
        personalized: makes it the client's personalized model for a while.
    """
    for name in (f"{stage}_step" for stage in STAGES):
        if is_overridden(name, scored):
            client.__dict__[name] = _evaluating(name, personalized)


def _evaluating(name: str, personalized: Callable[[], AbstractContextManager[L.LightningModule]]) -> Callable[..., Any]:
    def step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        with personalized() as learner:
            return call_step(learner, name, batch, batch_idx, dataloader_idx)

    return step


def _once_an_epoch(client: Any, hook: Callable[[], None]) -> Callable[[], None]:
    def on_train_epoch_end() -> None:
        if not client.epoch_ended:
            client.epoch_ended = True
            hook()

    return on_train_epoch_end


def _handing_on(hook: str, own: Callable[..., Any] | None, learners: Iterable[L.LightningModule]) -> Callable[..., Any]:
    def handing_on(*args: Any, **kwargs: Any) -> Any:
        if own is not None:
            own(*args, **kwargs)
        answers = []
        for number, learner in enumerate(learners):
            with _end_of_epoch(learner) if hook == "on_train_epoch_end" else nullcontext():
                answers.append(call_hook(learner, hook, *args, muted=number > 0, **kwargs))
        return answers[0] if answers else None

    return handing_on


def _end_of_epoch(learner: L.LightningModule) -> AbstractContextManager[None]:
    """Let one of several learners find nothing at the end of an epoch for which it rested.

    Ditto, FedPHP, FedSLR and pFedMe have such learners. A hook that takes the mean of what ``training_step`` collected
    raises then.
    """
    rested = learner.__dict__.get(TRAINED) is False
    if TRAINED in learner.__dict__:
        learner.__dict__[TRAINED] = False
    return suppress(Exception) if rested else nullcontext()


def _keeping(hook: str, learners: Mapping[str, L.LightningModule]) -> Callable[[dict[str, Any]], None]:
    """Return a hook that hands every learner the whole checkpoint of its Trainer, as if it were the only one in it.

    Tensors have the learner's own names, and hyperparameters are the learner's. What a further learner puts into the
    checkpoint has a place of its own there.
    """

    def keeping(checkpoint: dict[str, Any]) -> None:
        tensors = checkpoint.pop("state_dict")
        common = dict(checkpoint)
        for number, (name, learner) in enumerate(learners.items()):
            place = checkpoint if number == 0 else {**common, **checkpoint.get(f"kept_by_learner_{number}", {})}
            if hook == "on_save_checkpoint":
                place.update(saved_hparams(learner))
            # Under the learner's own names, and in the client's dict again: that one knows versions of its entries.
            place["state_dict"] = taken_out(tensors, name)
            call_hook(learner, hook, place)
            tensors.update({f"{name}.{key}": value for key, value in place.pop("state_dict").items()})
            if number:
                checkpoint[f"kept_by_learner_{number}"] = {
                    key: value for key, value in place.items() if key not in common or value is not common[key]
                }
        checkpoint["state_dict"] = tensors

    return keeping


def taken_out(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """Take what is of one learner out of the tensors of all, and return it under the learner's own names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensors.pop(key) for key in [*tensors] if key.startswith(prefix)}


def call_hook(learner: L.LightningModule, hook: str, *args: Any, muted: bool = False, **kwargs: Any) -> Any:
    """Call a learner's hook.

    Args:
        learner: the learner.
        hook: the hook's name.
        args: its arguments.
        muted: whether what the learner logs in it is not shown.
        kwargs: its arguments by name.
    """
    with in_hook(learner, hook), silenced(learner) if muted else nullcontext():
        return getattr(learner, hook)(*args, **kwargs)


def place_checkpoints(callbacks: Iterable[L.Callback], folder: Callable[[], Path]) -> None:
    """Let those callbacks of one client that write checkpoints have a folder of their own.

    Args:
        callbacks: the client's callbacks.
        folder: returns its folder; the last part of it is added to a folder that a callback has been given.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            own, given = folder(), callback.dirpath
            if given is None or Path(given).name != own.name:
                callback.dirpath = str(own if given is None else Path(given) / own.name)
