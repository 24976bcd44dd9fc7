"""A module inside another one, in the hook of a Trainer that knows only the outer one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from traceback import walk_tb
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics import Metric

#: what ``save_hyperparameters`` leaves in a module
HPARAMS = ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams")


class in_hook:
    """Let a module know which hook it is called in: what it logs is then taken as from that hook."""

    def __init__(self, module: L.LightningModule, hook: str) -> None:
        self.module, self.hook = module, hook

    def __enter__(self) -> None:
        # Past Module's own __setattr__, which would take longer than all the rest.
        attributes = self.module.__dict__
        self.outside, attributes["_current_fx_name"] = attributes.get("_current_fx_name"), self.hook

    def __exit__(self, *_: object) -> None:
        self.module.__dict__["_current_fx_name"] = self.outside


def came_of_loading(error: BaseException) -> bool:
    """Say whether an error came while a Trainer was loading a checkpoint, unless memory ran out."""
    place = _CheckpointConnector.resume_start.__code__.co_filename
    loading = any(frame.f_code.co_filename == place for frame, _ in walk_tb(error.__traceback__))
    return loading and not isinstance(error, torch.OutOfMemoryError)


def name_metrics(module: L.LightningModule, prefix: str) -> None:
    """Let the metrics of an inner module be known by their names in the outer one, where a resumed Trainer looks.

    Args:
        module: the inner module.
        prefix: its name in the outer one, with a dot.
    """
    metrics = {id(part): prefix + name for name, part in module.named_modules() if isinstance(part, Metric)}
    module._metric_attributes = metrics or None


def hand_up_hparams(inner: L.LightningModule, outer: L.LightningModule) -> None:
    """Let a Trainer log and save a module's hyperparameters as those of the one around it, unless that has its own."""
    if not outer.hparams:
        outer.__dict__.update({name: vars(inner)[name] for name in HPARAMS if name in vars(inner)})


def saved_hparams(module: L.LightningModule) -> dict[str, Any]:
    """Return what a Trainer puts into a checkpoint of a module's hyperparameters."""
    if not module.hparams:
        return {}
    saved: dict[str, Any] = {module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)}
    if hasattr(module, "_hparams_name"):
        saved[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
    return saved


def show_scores(trainer: L.Trainer, scores: Mapping[str, float]) -> None:
    """Put scores among those that a module and callbacks find in ``trainer.callback_metrics``."""
    trainer._logger_connector._callback_metrics.update({name: torch.tensor(value) for name, value in scores.items()})


def forget_scores(trainer: L.Trainer) -> None:
    """Let a Trainer know no scores."""
    trainer._logger_connector.reset_metrics()


def lend_data(trainer: L.Trainer, data: L.LightningDataModule | None) -> None:
    """Let a module find a data module in its Trainer, which does not load from it, but calls its batch hooks."""
    trainer.datamodule = data  # type: ignore[attr-defined]
    if (selector := trainer._data_connector._datahook_selector) is not None:
        selector.datamodule = data
    if data is not None:
        data.trainer = trainer


def lend_training(trainer: L.Trainer, loader: Any) -> None:
    """Let a module find ``train_dataloader`` and ``num_training_batches`` in a Trainer that does not train on them."""
    if trainer.fit_loop._combined_loader is None:  # it has not come so far as to have any
        return
    trainer.fit_loop._combined_loader = CombinedLoader(loader)
    length = inf if (n := sized_len(loader)) is None else n
    trainer.fit_loop.max_batches = _parse_num_batches(RunningStage.TRAINING, length, trainer.limit_train_batches)


def show_progress(trainer: L.Trainer, state: Mapping[str, Any], groups: Iterable[Iterable[Mapping[str, Any]]]) -> None:
    """Let a Trainer that trains nothing show how far another one has come: epochs, steps, options of optimizers.

    Args:
        trainer: the Trainer.
        state: what the other one has written into its checkpoint; nothing at the start.
        groups: for each optimizer the options of its parameter groups at the start.
    """
    steps = state.get("global_step", 0)
    trainer.fit_loop.epoch_progress.current.completed = state.get("epoch", 0)
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
    trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed = steps
    saved = [one["param_groups"] for one in state.get("optimizer_states", ())] or groups
    for optimizer, options in zip(trainer.optimizers, saved, strict=False):
        for group, own in zip(optimizer.param_groups, options, strict=False):
            group.update({name: value for name, value in own.items() if name != "params"})


def log_nothing(trainer: L.Trainer) -> None:
    """Let a Trainer write no metrics to its loggers on its own; what a module writes to them is written."""
    trainer._logger_connector.log_metrics = lambda *args, **kwargs: None  # type: ignore[method-assign]


class _OfNoJob(_CheckpointConnector):
    _hpc_resume_path = None


def leave_jobs_alone(trainer: L.Trainer) -> None:
    """Let a Trainer not continue from a requeued job's checkpoint; in a SLURM job it would take one from its folder."""
    trainer._checkpoint_connector = _OfNoJob(trainer)


def optimizers_in(configured: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in what ``configure_optimizers`` returned."""
    return [] if configured is None else _configure_optimizers(configured)[0]


def optimizers_and_schedules(module: L.LightningModule) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return a module's optimizers and schedules: those of its Trainer, or without one fresh ones."""
    trainer = module._trainer
    if trainer is not None and trainer.optimizers:
        return trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]
    configured: Any = module.configure_optimizers()
    optimizers, schedules, _ = _configure_optimizers(configured)
    return optimizers, [one["scheduler"] if isinstance(one, dict) else one for one in schedules]


def hand_down_trainer(module: L.LightningModule) -> None:
    """Let modules that have come into a module since it was given to its Trainer know that one too."""
    module.trainer = module._trainer


@contextmanager
def lent_trainer(module: L.LightningModule, trainer: L.Trainer) -> Iterator[None]:
    """Lend a module, and those inside it, a Trainer for as long as it has none of its own."""
    if module._trainer is not None:
        yield
        return
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = None


@contextmanager
def as_trained(module: L.LightningModule) -> Iterator[None]:
    """Let ``trainer.model`` be this module, for a module that finds itself, its parameters or its modes there."""
    trainer = module._trainer
    if trainer is None:
        yield
        return
    outer = trainer.model
    trainer.strategy.model = module
    try:
        yield
    finally:
        trainer.strategy.model = outer


@contextmanager
def told_evaluating(
    module: L.LightningModule, stage: RunningStage, loaders: Sequence[Any] | None = None
) -> Iterator[None]:
    """Let a module's Trainer, if there is one, say that it evaluates, and that it is this module, in its precision.

    Args:
        module: the module.
        stage: what the Trainer is said to do; a check of sanity stays one.
        loaders: what it is evaluated on: ``trainer.val_dataloaders``, ``num_val_batches`` and those for tests.
    """
    trainer = module._trainer
    if trainer is None:
        yield
        return
    before = trainer.state.stage
    trainer.state.stage = before if trainer.sanity_checking else stage
    try:
        with (
            as_trained(module),
            _having(trainer, stage, loaders),
            trainer.precision_plugin.forward_context(),
        ):
            yield
    finally:
        trainer.state.stage = before


@contextmanager
def _having(trainer: L.Trainer, stage: RunningStage, loaders: Sequence[Any] | None) -> Iterator[None]:
    """Let ``trainer.val_dataloaders``, ``num_val_batches`` and those for tests be of these loaders."""
    loops = {
        RunningStage.VALIDATING: [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop],
        RunningStage.TESTING: [trainer.test_loop],
    }
    own = [] if loaders is None else loops.get(stage, [])
    before = [(loop._combined_loader, loop._max_batches) for loop in own]
    lengths = [sized_len(loader) for loader in loaders or ()]
    for loop in own:
        loop._combined_loader = CombinedLoader(loaders if len(lengths) > 1 else loaders[0], "sequential")  # type: ignore[index]
        loop._max_batches = [inf if length is None else length for length in lengths]
    try:
        yield
    finally:
        for loop, (loader, number) in zip(own, before, strict=True):
            loop._combined_loader, loop._max_batches = loader, number
