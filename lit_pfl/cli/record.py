"""What is kept of how a run was made: its configuration in its folder, its options in checkpoints and loggers."""

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import yaml

from lit_pfl.cli.folders import OF_A_RUN, put_aside
from lit_pfl.cli.loggers import runs_of
from lit_pfl.cli.options import by_name, nested, of_a_run
from lit_pfl.data import FederatedDataModule
from lit_pfl_callbacks import RunLogger, run_folder
from lit_pfl_callbacks.files import write_whole
from lit_pfl_callbacks.rounds import writes
from lit_pfl_callbacks.run_folder import write_rows

PARTS: tuple[Literal["train", "val", "test"], ...] = ("train", "val", "test")


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
