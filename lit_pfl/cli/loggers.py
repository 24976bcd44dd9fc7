"""The loggers of a command: what they need to be there, and with which of their runs they go on."""

import importlib.util
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lit_pfl.errors import ConfigError

#: modules of which a logger needs one, and how to come by it
NEEDED = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "TensorBoard: pip install 'lit-pfl[tensorboard]'"),
    "MLFlowLogger": (("mlflow",), "MLflow: pip install mlflow"),
    "CometLogger": (("comet_ml",), "Comet: pip install comet-ml"),
}
#: loggers that have a folder for every run and add to what is there
IN_A_FOLDER = ("RunLogger", "TensorBoardLogger")
#: the option by which a logger is told which of its runs it goes on with
GOES_ON_BY = {"TensorBoardLogger": "version", "WandbLogger": "id"}


def name_of(logger: Any) -> str:
    """Return the name of the class in a logger's options; nothing for ``true``, ``false`` and ``null``."""
    return str(getattr(logger, "class_path", "")).rpartition(".")[2]


def is_run_logger(logger: Any) -> bool:
    """Say whether the options are a RunLogger's."""
    return name_of(logger) == "RunLogger"


def refuse_missing(loggers: Iterable[Any]) -> None:
    """See that what loggers need is installed.

    Raises:
        ConfigError: when it is not.
    """
    for name in map(name_of, loggers):
        modules, how = NEEDED.get(name, ((), ""))
        if modules and not any(map(importlib.util.find_spec, modules)):
            raise ConfigError(f"trainer.logger={name} needs {how}.")


def place(loggers: Sequence[Any], folder: Path) -> None:
    """Let every RunLogger write into a folder, and the first logger, whose folder is the run's, if it can."""
    for one in loggers:
        if is_run_logger(one) or (one is loggers[0] and name_of(one) in IN_A_FOLDER):
            options = one.init_args
            options.save_dir, options.name, options.version = str(folder.parent), "", folder.name


def go_on(loggers: Iterable[Any], runs: Iterable[Sequence[Any]]) -> None:
    """Let loggers go on with the runs that they have begun, where nothing else is asked for.

    Args:
        loggers: their options.
        runs: what :func:`runs_of` has told of them.
    """
    left = list(runs)
    for one in loggers:
        known = next((run for run in left if run[0] == name_of(one) in GOES_ON_BY), None)
        if known is not None:
            left.remove(known)
            option = GOES_ON_BY[known[0]]
            if one.init_args.version is one.init_args[option] is None:
                one.init_args[option] = known[1]
        if name_of(one) == "WandbLogger" and one.init_args.version is one.init_args.id is None:
            one.init_args.id = secrets.token_hex(4)  # else its folder has no name before W&B has given it one


def begins_anew(logger: Any) -> bool:
    """Say whether a logger can go on with no run, so that a resumed one gets another folder where it is the first."""
    name = name_of(logger)
    return bool(name) and name not in IN_A_FOLDER and name not in GOES_ON_BY


def runs_of(trainer: L.Trainer) -> list[list[Any]]:
    """Return the names of a Trainer's loggers, each with what it calls its run, if it can go on with it."""
    named = [(type(logger).__name__, logger) for logger in trainer.loggers]
    return [[name, logger.version if name in GOES_ON_BY else None] for name, logger in named]
