"""The papers' tables: what they print, and which run stands for which number."""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lit_pfl.cli.config_files import with_fragments
from lit_pfl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "configs" / "paper"
#: a number as printed, and its deviation where there is one
NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?(?: ± .*)?")


class Reader:
    """Reads the configuration files of a paper, each once.

    Args:
        paper: folder of the paper.
    """

    def __init__(self, paper: Path) -> None:
        self.paper = paper
        self._contents: dict[str, list[dict[str, Any]]] = {}

    def path(self, name: str) -> Path:
        """Return the path of a file by its name in the paper's folder."""
        return self.paper / f"{name}.yaml"

    def contents(self, name: str) -> list[dict[str, Any]]:
        """Return what a file holds, and before it what it builds on.

        Raises:
            ConfigError: when it is not there.
        """
        if name not in self._contents:
            path = self.path(name)
            if not path.is_file():
                raise ConfigError(f"There is no {path}.")
            files = map(Path, with_fragments(str(path)))
            self._contents[name] = [yaml.safe_load(file.read_text()) or {} for file in files]
        return self._contents[name]


@dataclass(frozen=True)
class Run:
    """A run that stands for one or more numbers of a paper, whatever the seed.

    Args:
        scale: ``paper``, or the file of the paper's folder that lies over the configuration.
        files: the configuration files in their order, by their names in the paper's folder.
        reader: reads them.
    """

    scale: str
    files: tuple[str, ...]
    reader: Reader = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """What it is called in the results."""
        return " ".join(self.files)

    @property
    def paper(self) -> str:
        """The paper's name."""
        return self.reader.paper.name

    @property
    def paths(self) -> list[Path]:
        """The configuration files."""
        return [self.reader.path(name) for name in self.files]

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What the configuration files come to, with all that they build on."""
        whole: dict[str, Any] = {}
        for part in (part for name in self.files for part in self.reader.contents(name)):
            _lay_over(whole, part)
        whole.pop("fragments", None)
        return whole

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration, by which its results are known, under whatever name they were measured."""
        return hashlib.sha256(json.dumps(self.configuration, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.configuration["trainer"]["max_epochs"]


@dataclass(frozen=True)
class Cell:
    """A place in a table.

    Args:
        row: its row's name.
        column: its column's name.
        printed: what the paper prints there; empty where it prints nothing.
        run: what is run for it; None where no run gives this number.
        show: what of the run is shown: ``accuracy``, ``cost``, ``parameters`` or ``nothing``.
        model: which of the method's models it is of; None is its own.
        clients: the clients that it is the mean over; None is all of them.
    """

    row: str
    column: str
    printed: str
    run: Run | None
    show: str = "accuracy"
    model: str | None = None
    clients: tuple[int, ...] | None = None

    @property
    def number(self) -> float | None:
        """The printed number; None where there is none that could be compared."""
        found = NUMBER.fullmatch(self.printed)
        return float(found[1]) if found else None


class Table:
    """A table of a paper, read from ``configs/paper/PAPER/TABLE.yaml``.

    Columns and rows are named there, each with ``run``, the configuration files that it stands for, and what else is
    needed to find its numbers: ``show``, ``model`` and ``clients`` of :class:`Cell`, ``over``, a file that comes after
    the scale, and words that fill the ``{}`` in file names. A cell has what its row and its column have, the row first.
    A row with ``as`` is one of our own beside a printed one. ``printed`` are the paper's numbers, letter for letter.

    Args:
        paper: folder of the paper.
        name: the table.
        scale: see :class:`Run`.

    Raises:
        ConfigError: where there is no such table, or none at this scale.
    """

    def __init__(self, paper: Path, name: str, scale: str = "paper") -> None:
        path = paper / f"{name}.yaml"
        there = sorted(p.stem for p in paper.glob("*.yaml") if "printed:" in p.read_text())
        if name not in there:
            papers = ", ".join(sorted(p.name for p in paper.parent.iterdir() if p.is_dir()))
            raise ConfigError(
                f"{name}: {paper.name} has {', '.join(there)}." if there else f"{paper.name}: choose one of {papers}."
            )
        scales = ["paper", *(s for s in ("middle", "reduced") if (paper / f"{s}.yaml").is_file())]
        if scale not in scales:
            raise ConfigError(f"--scale {scale}: {paper.name} has {', '.join(scales)}.")
        # All text: "64.20" stays as it is printed.
        content: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
        self.paper, self.name, self.scale = paper, name, scale
        self.title: str = content["title"]
        self.about: str = content["about"]
        self.sections: str = content.get("sections", "columns")
        self.cost: dict[str, str] = content.get("cost", {})
        self.columns = {column: _entry(value) for column, value in content["columns"].items()}
        self.rows = {row: _entry(value) for row, value in content["rows"].items()}
        self.printed: dict[str, list[str]] = content["printed"]
        self._first: dict[str, list[str]] = content.get("first", {})
        self._reader = Reader(paper)
        self._runs: dict[tuple[str, ...], Run] = {}
        wrong = [row for row, numbers in self.printed.items() if len(numbers) != len(self.columns)]
        if wrong:
            raise ConfigError(f"{path}: printed: {wrong[0]} needs a number for each of {len(self.columns)} columns.")

    def stands_for(self, row: str) -> str:
        """Return the printed row that a row is beside: itself, or another one."""
        return self.rows[row].get("as", row)

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell."""
        entry = {**self.rows[row], **self.columns[column]}
        files = [*self.rows[row].get("run", []), *self.columns[column].get("run", [])]
        over = [] if self.scale == "paper" else [self.scale]
        words = {key: value for key, value in entry.items() if isinstance(value, str)}
        files = [name.format(**words) for name in [*files, *over, *entry.get("over", [])]]
        numbers = self.printed.get(self.stands_for(row))
        show = entry.get("show", "accuracy")
        return Cell(
            row,
            column,
            numbers[list(self.columns).index(column)] if numbers else "",
            None if show == "nothing" else self._run(tuple(files)),
            show,
            entry.get("model"),
            tuple(map(int, entry["clients"])) if "clients" in entry else None,
        )

    def _run(self, files: tuple[str, ...]) -> Run:
        return self._runs.setdefault(files, Run(self.scale, files, self._reader))

    def runs(
        self, columns: Sequence[str] = (), rows: Sequence[str] = (), seeds: Iterable[int] = (1,)
    ) -> list[tuple[Run, int]]:
        """Return what is to be run for a table, pairs of a run and a seed, the most telling first.

        A column with all its rows comes before the next column, and a seed of it before the next seed.

        Args:
            columns: the columns; all of them if there is none.
            rows: the rows; all of them if there is none.
            seeds: the seeds.

        Raises:
            ConfigError: for a column or row that the table has not.
        """
        found: dict[tuple[str, int], tuple[Run, int]] = {}
        for column in self._ordered("columns", columns):
            cells = [self.cell(row, column) for row in self._ordered("rows", rows)]
            for seed in seeds:
                for run in (cell.run for cell in cells if cell.run is not None):
                    found.setdefault((run.fingerprint, seed), (run, seed))  # one run may stand for several cells
        return list(found.values())

    def _ordered(self, kind: str, asked: Sequence[str]) -> list[str]:
        there = self.columns if kind == "columns" else self.rows
        unknown = next((name for name in asked if name not in there), None)
        if unknown is not None:
            raise ConfigError(f"--{kind} {unknown!r}: {self.paper.name} {self.name} has {'; '.join(there)}.")
        first = [name for name in self._first.get(kind, []) if name in there]
        return [name for name in dict.fromkeys([*first, *there]) if not asked or name in asked]


def _entry(value: Any) -> dict[str, Any]:
    entry = {"run": value} if isinstance(value, str) else dict(value)
    for key in ("run", "over"):
        if isinstance(entry.get(key), str):
            entry[key] = [entry[key]]
    return entry


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Lay a configuration over another one, in place."""
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = copy.deepcopy(value)
