"""What options come to, tried before there are clients and processes."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger

from lit_pfl.core import Client
from lit_pfl.engines.trainers import planned_rounds
from lit_pfl.engines.validation import monitors
from lit_pfl.errors import ConfigError
from lit_pfl.federation import Federation

SEEDS = 2**32
#: steps of a scheduler that are tried where it is not known how many there will be, and at most
FEW, MANY = 2, 10_000


def check_seed(seed: int | bool | None) -> None:
    """See that a seed is one.

    Raises:
        ConfigError: when NumPy cannot take it.
    """
    if seed is None or not 0 <= seed < SEEDS:
        given = "null" if seed is None else seed
        raise ConfigError(
            f"seed_everything={given}: give a whole number from 0 to {SEEDS - 1}, true for any one, or false for none."
        )


def check_rounds(rounds: int | None) -> None:
    """See that a number of rounds is one.

    Raises:
        ConfigError: when it is not.
    """
    if rounds is not None and rounds < -1:
        raise ConfigError(f"trainer.max_epochs={rounds}: give the number of rounds, or -1 for no end.")


def refuse_null(options: Mapping[str, Any]) -> None:
    """See that no option of the method and of the data is null that may not be: the parser takes it for not given.

    Raises:
        ConfigError: for the first one that is.
    """
    for part in ("model", "data"):
        for name, value in (options[part].get("init_args") or {}).items():
            parameter = _parameter(options[part]["class_path"], name)
            if value is None and parameter is not None and "None" not in str(parameter.annotation):
                known = "the default" if callable(parameter.default) else parameter.default
                raise ConfigError(f"{part}.{name}=null: give a value, or leave it out for {known}.")


def _parameter(class_path: str, name: str) -> inspect.Parameter | None:
    """Return a parameter of a class that has a default which is not None; of the first of its bases that names it."""
    module, _, cls = class_path.rpartition(".")
    for base in getattr(import_module(module), cls).__mro__[:-1]:
        found = inspect.signature(base.__init__).parameters.get(name)
        if found is not None:
            return None if found.default in (None, inspect.Parameter.empty) else found
    return None


def try_optimizer(federation: Federation, trainer: L.Trainer, options: Mapping[str, Any]) -> None:
    """See whether the options of optimizer and scheduler are any good: step by step, as many as are planned.

    Args:
        federation: the federation.
        trainer: its Trainer.
        options: those of the method.

    Raises:
        ConfigError: when they are not.
    """
    client = federation.prototype
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer: Any = _tried("optimizer", options, lambda: client.make_optimizer([weight]))
    _tried("optimizer", options, lambda: optimizer.step(lambda: 0.0))
    if client.make_scheduler is not None:
        make = client.make_scheduler
        scheduler: Any = _tried("scheduler", options, lambda: make(optimizer))
        for step in range(_steps(client, federation, trainer)):
            _tried("scheduler", options, scheduler.step, f" in epoch {step + 1}")


def _steps(client: Client, federation: Federation, trainer: L.Trainer) -> int:
    """Return how many steps of a scheduler are to be tried: those of a client that is in every round, if all are."""
    rounds = planned_rounds(trainer)
    if rounds < 0 or (federation.participation != 1 and client.scheduler_counts == "epochs"):
        return FEW
    return min(MANY, rounds * (federation.local_epochs if client.scheduler_counts == "epochs" else 1))


def _tried(name: str, options: Mapping[str, Any], make: Any, when: str = "") -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of learning rates that nobody trains with
            return make()
    except Exception as error:  # of a class that the user has chosen, by options that the user has given
        given = options.get(name) or {}
        kind = given["class_path"].rpartition(".")[2] if isinstance(given, dict) else given
        values = given.get("init_args") or {} if isinstance(given, dict) else {}
        written = ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
        what = f"={kind}({written})" if kind else ""
        raise ConfigError(f"model.{name}{what}: {type(error).__name__}{when}: {error}") from error


def open_wandb(loggers: Iterable[Any]) -> None:
    """Begin the runs of W&B's loggers.

    Raises:
        ConfigError: when W&B has no account, or cannot be reached.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            try:
                _ = logger.experiment
            except wandb.Error as error:
                raise ConfigError(
                    f"trainer.logger=WandbLogger: {error} Without an account or a network: WANDB_MODE=offline."
                ) from error


def refuse_unknown_metrics(trainer: L.Trainer, error: Exception) -> None:
    """See that an error is not of a callback that watches a metric which is not there, once some are logged.

    Raises:
        ConfigError: when it is, as it names the metric.
    """
    known = sorted(trainer.callback_metrics)
    for monitor, callback in monitors(trainer).items() if known else ():
        if monitor not in known and monitor in str(error):
            raise ConfigError(
                f"trainer.callbacks: {callback}(monitor={monitor}): there is no such metric; choose one of "
                f"{', '.join(known)}."
            ) from error
