"""The folder of a run, and the logger that fills its ``metrics.csv``."""

import csv
import io
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_pfl_callbacks.files import replacing


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of a Trainer's run: its first logger's directory, or the Trainer's own root."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if (folder := getattr(logger, "log_dir", None)) is not None:
        return Path(folder)
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / str(logger.version)


class RunLogger(CSVLogger):
    """A CSV logger that keeps one row a round, and that a resumed run can go on with.

    What is logged of a round later joins the row that the round has. The first round that a process logs removes the
    rows of later ones, so a run resumed from a checkpoint into its own folder leaves ``metrics.csv`` as if it had
    never been interrupted. Where there is no metric called ``round``, the logged step takes its place.

    Args:
        save_dir: folder of all runs.
        name: folder of the runs of one kind.
        version: the run's own folder; by default ``version_`` and the next free number.
    """

    def __init__(self, save_dir: str = "runs", name: str | None = None, version: int | str | None = None) -> None:
        super().__init__(save_dir, name=name, version=version, flush_logs_every_n_steps=1)
        self._rows: list[dict[str, Any]] | None = None

    @property
    def experiment(self) -> _ExperimentWriter:
        """Not in use: the logger writes its rows itself."""
        raise AttributeError("RunLogger writes rows itself.")

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` says it all."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write metrics of a step."""
        path = Path(self.log_dir) / "metrics.csv"
        values = {name: float(value) for name, value in metrics.items()}
        round = int(values.get("round", step or 0))
        if self._rows is None:
            self._rows = read_rows_before(path, round + 1, "round")
        if not self._rows or int(self._rows[-1]["round"]) != round:
            self._rows.append({})
        self._rows[-1] |= values | {"round": round}
        write_rows(path, self._rows)

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: every row is written at once."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Do nothing: every row is written at once."""


def read_rows_before(path: Path, step: int, column: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV file that belong to earlier steps: what an interrupted run has left to go on from.

    A last line that was cut off by the interruption does not count.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [row for row in rows if int(float(row[column])) < step]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file whole, under a temporary name, and rename it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())
