"""What is kept of how a run was made, in its folder, its checkpoints and its loggers; and continuing with all of
them."""

import importlib.util
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import yaml

from lit_pfl.cli.folders import OF_A_RUN, put_aside
from lit_pfl.cli.options import by_name, differences, may_change, nested, of_a_run
from lit_pfl.data import FederatedDataModule
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import read_checkpoint
from lit_pfl_callbacks import RunLogger, run_folder
from lit_pfl_callbacks.files import write_whole
from lit_pfl_callbacks.rounds import writes
from lit_pfl_callbacks.run_folder import write_rows

PARTS: tuple[Literal["train", "val", "test"], ...] = ("train", "val", "test")
#: the options that make a difference to a model that is only scored
OF_A_MODEL = ("model", "data")
#: modules of which a logger needs one, and how to come by it
NEEDED = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "TensorBoard: pip install 'lit-pfl[tensorboard]'"),
    "MLFlowLogger": (("mlflow",), "MLflow: pip install mlflow"),
    "CometLogger": (("comet_ml",), "Comet: pip install comet-ml"),
}
#: names that YAML reads as whole numbers, such as 7, 0x7, 2026_11_28 and 7:30
NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]*")
#: loggers that have a folder for every run and add to what is there
IN_A_FOLDER = ("RunLogger", "TensorBoardLogger")
#: the option by which a logger is told which of its runs it goes on with
GOES_ON_BY = {"TensorBoardLogger": "version", "WandbLogger": "id"}


class RunRecord(L.Callback):
    """Records what runs, and only that.

    Who has which data is written to ``partition.csv``: how many samples of every class, client by client. A new run's
    configuration is written to ``config.yaml`` when it starts, and never changed. That of a resume with something
    changed is written to ``config.resumed_1.yaml`` and so on, after its first round.

    Args:
        config: the command's configuration.
        changed: the options that a resumed run has other than before, with both values.
    """

    def __init__(self, config: dict[str, Any], changed: dict[str, tuple[Any, Any]]) -> None:
        self.config = of_a_run(config)
        self.changed = changed
        self._written = False
        self._runs: list[list[Any]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the loggers, before they are first saved."""
        self._tell_loggers(trainer)
        self._runs = runs_of(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record a run that is new."""
        folder = run_folder(trainer)
        if writes(trainer) and trainer.ckpt_path is None and isinstance(trainer.loggers[0], RunLogger):
            put_aside(folder)  # no run was in it when it was taken
        if writes(trainer) and not (folder / "config.yaml").exists():
            self._write(folder / "config.yaml", [])
            self._written = True
        if writes(trainer) and not (folder / "partition.csv").exists():
            with suppress(OSError):  # a full disk is told of by what the run cannot do without
                _write_partition(folder / "partition.csv", trainer.datamodule)  # type: ignore[attr-defined]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record a resume, once it has run."""
        if self._written or not self.changed or not writes(trainer):
            return
        folder, number = run_folder(trainer), 1
        while (path := folder / f"config.resumed_{number}.yaml").exists():
            number += 1
        notes = [f"{name}: {old} -> {new}" for name, (old, new) in self.changed.items()]
        self._write(path, [f"resumed after round {trainer.current_epoch}", *notes])
        self._written = True

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the loggers of what is scored."""
        self._tell_loggers(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the loggers of what is scored."""
        if trainer.state.fn == "validate":
            self._tell_loggers(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the options by name and the loggers' runs, for a checkpoint."""
        return {"options": by_name(self.config), "loggers": self._runs}

    def _tell_loggers(self, trainer: L.Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(nested(self.config))

    def _write(self, path: Path, notes: list[str]) -> None:
        head = f"{OF_A_RUN}{version('lit-pfl')}\n" + "".join(f"# {' '.join(note.split())}\n" for note in notes)
        write_whole(path, head + yaml.safe_dump(self.config, sort_keys=False))


def _write_partition(path: Path, data: FederatedDataModule) -> None:
    """Write how many samples of a class a client has, where it has any; nothing of data without classes."""
    rows = [
        {"client": client, "class": number, "split": part, "count": int(count)}
        for part in PARTS
        if (counts := data.class_counts(part)) is not None
        for (client, number), count in np.ndenumerate(counts)
        if count
    ]
    if rows:
        write_rows(path, rows)


def saved_record(path: Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Return what the run that wrote a checkpoint has recorded of itself, such as its ``options`` by name.

    None where it was written from Python.

    Raises:
        ConfigError: when the file is not a whole checkpoint.
    """
    callbacks = read_checkpoint(path, weights_only, mmap=True).get("callbacks")
    record = callbacks.get("RunRecord") if isinstance(callbacks, dict) else None
    return record if isinstance(record, dict) and isinstance(record.get("options"), dict) else None


def taken(before: dict[str, Any], now: dict[str, Any], scoring: bool) -> dict[str, tuple[Any, Any]]:
    """Return the options that are taken although they differ from the checkpoint's, with both values.

    Args:
        before: the options of the run that wrote the checkpoint, by name.
        now: those given.
        scoring: whether the model is only to be scored, so that only what makes it and its data must agree.

    Raises:
        ConfigError: for the first one that makes it another run.
    """
    differing = differences(before, now)
    for name, (old, new) in differing.items():
        if not may_change(name) and (not scoring or name.split(".")[0] in OF_A_MODEL):
            if not {name, name.rpartition(".")[0]} & now.keys():
                raise ConfigError(
                    f"{name}={old} is what the run has that wrote the checkpoint, and there is no such option here. "
                    "If another version wrote it, load it in Python: trainer.fit(federation, ckpt_path=...)."
                )
            raise ConfigError(
                f"{name}={new}: the run that wrote the checkpoint has {name}={old}. Give that, or "
                f"{'score another run' if scoring else 'begin a run of its own, without --ckpt_path'}."
            )
    return differing


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
    # the parser would make a number of it, as which it is called version_7
    version = f"./{folder.name}" if NUMBER.fullmatch(folder.name) else folder.name
    for one in loggers:
        if is_run_logger(one) or (one is loggers[0] and name_of(one) in IN_A_FOLDER):
            options = one.init_args
            options.save_dir, options.name, options.version = str(folder.parent), "", version


def go_on(loggers: Iterable[Any], runs: Iterable[Sequence[Any]]) -> None:
    """Let loggers continue the runs that they have begun, where nothing else is asked for.

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
    """Say whether a logger can continue no run, so that a resumed one gets another folder where it is the first."""
    name = name_of(logger)
    return bool(name) and name not in IN_A_FOLDER and name not in GOES_ON_BY


def runs_of(trainer: L.Trainer) -> list[list[Any]]:
    """Return the names of a Trainer's loggers, each with what it calls its run, if it can continue it."""
    named = [(type(logger).__name__, logger) for logger in trainer.loggers]
    return [[name, logger.version if name in GOES_ON_BY else None] for name, logger in named]
