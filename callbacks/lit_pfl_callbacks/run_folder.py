"""The folder of a run, and the logger that fills its ``metrics.csv``."""

import csv
import io
import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl_callbacks.files import write_whole

_REMEDY = "mend it, or move it away"
#: the folder of all runs, where none is given
RUNS = "runs"


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of a Trainer's run: its first logger's directory, or the Trainer's own root."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if (folder := getattr(logger, "log_dir", None)) is not None:
        return Path(folder)
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / str(logger.version)


def latest_config(folder: Path) -> Path:
    """Return the file with the options that a run had last: its latest resume's, or those that it began with."""
    there = {path: re.fullmatch(r"config\.resumed_(\d+)\.yaml", path.name) for path in folder.glob("*.yaml")}
    resumed = {int(found[1]): path for path, found in there.items() if found}
    return resumed[max(resumed)] if resumed else folder / "config.yaml"


def resume_command(folder: Path) -> str | None:
    """Return the command that continues a run; None if its folder has no checkpoint or no configuration."""
    config, checkpoint = latest_config(folder), folder / "checkpoints" / "last.ckpt"
    if not config.exists() or not checkpoint.exists():
        return None
    words = [f"./{path}" if str(path).startswith("-") else str(path) for path in (config, checkpoint)]  # no options
    return shlex.join(["lit-pfl", "fit", "--config", words[0], "--ckpt_path", words[1]])


class RunLogger(CSVLogger):
    """A CSV logger that keeps one row a round, and that a resumed run can continue.

    What is logged of a round later joins the row that the round has. The first round that a process logs removes the
    rows of later ones, so a run resumed from a checkpoint into its own folder leaves ``metrics.csv`` as if it had
    never been interrupted. Where there is no metric called ``round``, the logged step takes its place.

    Args:
        save_dir: folder of all runs. On the command line ``trainer.default_root_dir``, if given, takes the place of
            ``runs``.
        name: folder of the runs of one kind.
        version: the run's own folder; by default ``version_`` and the next free number.
        add_only: whether all that is there stays as it is, rows of later rounds too: for scoring a finished run.
    """

    def __init__(
        self,
        save_dir: str = RUNS,
        name: str | None = None,
        version: int | str | None = None,
        add_only: bool = False,
    ) -> None:
        super().__init__(save_dir, name=name, version=version, flush_logs_every_n_steps=1)
        self.add_only = add_only
        self._numbers_itself = version is None
        self._rows: list[dict[str, Any]] | None = None  # by round
        self._columns: list[str] = []
        self._lines: list[str] = []  # the rows as they are written

    def make_folder(self) -> Path:
        """Make the run's folder: another one if somebody else has just taken it, unless a version was given.

        Raises:
            FileExistsError: when the given one is there already.
        """
        while True:
            try:
                Path(self.log_dir).mkdir(parents=True)
                return Path(self.log_dir)
            except FileExistsError:
                if not self._numbers_itself:
                    raise
                self._version = None

    @property
    def experiment(self) -> _ExperimentWriter:
        """Not in use: the logger writes its rows itself."""
        raise AttributeError("RunLogger writes rows itself.")

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` says it all."""

    @rank_zero_only
    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Look whether the run can continue its ``metrics.csv``: a Trainer calls this before a run's first batch."""
        path = Path(self.log_dir) / "metrics.csv"
        rows = checked_rows(path, ["round"])
        lines = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 1
        if lines != 1 + len(rows):  # it is written whole, never in part
            rank_zero_warn(
                f"{path}: was cut off after line {min(lines, 1 + len(rows))}; the run continues without the rest."
            )

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write metrics of a step."""
        path = Path(self.log_dir) / "metrics.csv"
        # An evaluation by itself logs an epoch, always 0.
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        round = int(values.get("round", step or 0))
        if self._rows is None:
            rows = checked_rows(path, ["round"])
            self._rows = sorted((row for row in rows if self.add_only or _round(row) <= round), key=_round)
        row = values | {"round": round}
        place = bisect_left(self._rows, round, key=_round)
        if place < len(self._rows) and _round(self._rows[place]) == round:
            former = self._rows[place]
            kept = {name: value for name, value in former.items() if value != ""} if self.add_only else {}
            row = self._rows[place] = former | row | kept
        else:
            self._rows.insert(place, row)
            self._lines.insert(place, "")
        if row.keys() <= {*self._columns}:
            self._lines[place] = _text([row], self._columns)
        else:
            self._columns = _columns(self._rows)
            self._lines = [_text([row], self._columns) for row in self._rows]
        # whole, so that a killed run leaves the former rows; to make their text anew would take longer every round
        write_whole(path, "".join([_header(self._columns), *self._lines]))

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: every row is written at once."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Do nothing: every row is written at once."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, none where there is no file. A last line that was cut off does not count."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin files with a mark
        text = file.read()
    whole = text[: text.rfind("\n") + 1]  # what follows was cut off, also where it looks whole
    return [row for row in csv.DictReader(io.StringIO(whole, newline="")) if None not in row.values()]


def checked_rows(path: Path, columns: Sequence[str], step: str = "round") -> list[dict[str, Any]]:
    """Return the rows of a CSV file that a run continues with.

    Args:
        path: the file.
        columns: columns that it must have.
        step: the one of them that holds numbers.

    Raises:
        MisconfigurationException: when it is another file, or a damaged one; it says where.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or columns  # of an empty file none
            lines = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise MisconfigurationException(f"{path}: is not a CSV file ({error}); {_REMEDY}.") from None
    missing = [name for name in columns if name not in names]
    if missing:
        raise MisconfigurationException(f"{path}: has no column {missing[0]!r}; {_REMEDY}.")
    for number, row in lines:
        if None in row:
            raise MisconfigurationException(f"{path}: line {number} has more fields than line 1 names; {_REMEDY}.")
        if None not in row.values() and not _is_number(row[step]):
            raise MisconfigurationException(
                f"{path}: line {number} has {row[step]!r} as {step!r}, which must be a number; {_REMEDY}."
            )
    return [row for _, row in lines if None not in row.values()]  # a last line that was cut off does not count


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def read_rows_before(path: Path, step: int, column: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV file that belong to earlier steps: what an interrupted run has left to continue from."""
    return [row for row in checked_rows(path, [column], column) if int(float(row[column])) < step]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Write a CSV file whole, under a temporary name, and rename it; return its columns."""
    columns = _columns(rows)
    write_whole(path, _header(columns) + _text(rows, columns))
    return columns


def _round(row: Mapping[str, Any]) -> int:
    return int(float(row["round"]))


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _header(columns: Sequence[str]) -> str:
    return _text([dict(zip(columns, columns, strict=True))], columns)


def _text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue()


def append_rows(path: Path, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Write rows at the end of a CSV file with these columns: all of them, or none where the disk is full.

    Raises:
        OSError: when they cannot be written; it names the file.
    """
    size = path.stat().st_size
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerows(rows)
    except OSError as error:  # which says what, but seldom where
        with suppress(OSError), path.open("r+b") as whole:
            whole.truncate(size)
        raise OSError(error.errno, f"cannot be written ({error.strerror or error})", str(path)) from error
