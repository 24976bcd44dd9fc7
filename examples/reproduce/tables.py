"""The papers' tables: what they print, and which run stands for which number."""

import copy
import hashlib
import itertools
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

    A name such as ``rows/fedavg`` or ``data/cifar10`` is of a file in the paper's folder. What several papers have in
    common lies above it: in ``configs/paper`` or in ``configs``.

    Args:
        paper: folder of the paper.
    """

    def __init__(self, paper: Path) -> None:
        self.paper = paper
        self._contents: dict[str, list[dict[str, Any]]] = {}

    def path(self, name: str) -> Path | None:
        """Return the path of a file by its name; None when it is not there."""
        paths = (folder / f"{name}.yaml" for folder in (self.paper, *self.paper.parents[:2]))
        return next((path for path in paths if path.is_file()), None)

    def contents(self, name: str) -> list[dict[str, Any]]:
        """Return the content of a file, after that of the files it builds on.

        Raises:
            ConfigError: when it is not there.
        """
        if name not in self._contents:
            path = self.path(name)
            if path is None:
                raise ConfigError(
                    f"There is no {self.paper / name}.yaml, nor one of that name in the two folders above."
                )
            files = map(Path, with_fragments(str(path)))
            self._contents[name] = [yaml.safe_load(file.read_text()) or {} for file in files]
        return self._contents[name]


@dataclass(frozen=True)
class Run:
    """A run that stands for one or more numbers of a paper, whatever the seed.

    Args:
        scale: ``paper``, or the file of the paper's folder that lies over the configuration.
        parts: names of configuration files and options, such as ``model.tau=0.9``, each laid over those before it.
        reader: reads the files.
    """

    scale: str
    parts: tuple[str, ...]
    reader: Reader = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """What it is called in the results."""
        return " ".join(self.parts)

    @property
    def folder(self) -> str:
        """The name of its folder: files without theirs, options without their classes, and the fingerprint."""
        short = "+".join(re.sub(r"^[^=]*[/.]", "", part) for part in self.parts)
        return f"{short}-{self.fingerprint}"

    @property
    def paper(self) -> str:
        """The paper's name."""
        return self.reader.paper.name

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The whole configuration: all its parts, and the files that they build on."""
        whole: dict[str, Any] = {}
        for part in self.parts:
            option, is_option, value = part.partition("=")
            if is_option:
                _set(whole, option, yaml.safe_load(value))
            else:
                for content in self.reader.contents(part):
                    _lay_over(whole, content)
        whole.pop("fragments", None)
        return whole

    @property
    def text(self) -> str:
        """The whole configuration as YAML, for ``lit-pfl fit --config``."""
        # not sorted: Similarity writes its groups in the order in which they are given
        return yaml.safe_dump(self.configuration, sort_keys=False)

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
    """A table or figure of a paper, read from ``configs/paper/PAPER/tables.yaml``.

    A row or a column is what a cell runs for it: a configuration file (``rows/simfed``), an option as on the command
    line (``model.tau=0.9``), or a list of these, each laid over those before it. A cell lays its column over its row.
    Where more is to be said, the row or column is a mapping with these keys; where both have one, the column's counts:

    - ``run``: the files and options.
    - ``over``: files and options that come after the scale.
    - ``show``, ``model``, ``clients``: see :class:`Cell`.
    - ``as``: the printed row that a row of our own is beside.
    - any other word: fills ``{word}`` in files and options, of which one that is then empty is left out.

    A page has a section a column (``sections: columns``, the default) or a row (``rows``), or is one table (``one``).
    ``printed`` are the paper's numbers, letter for letter; a figure may have none.

    Args:
        paper: folder of the paper.
        name: the table.
        scale: see :class:`Run`.

    Raises:
        ConfigError: where there is no such table, or none at this scale.
    """

    def __init__(self, paper: Path, name: str, scale: str = "paper") -> None:
        path = paper / "tables.yaml"
        if not path.is_file():
            papers = ", ".join(sorted(found.parent.name for found in paper.parent.glob("*/tables.yaml")))
            raise ConfigError(f"{paper.name}: choose one of {papers}.")
        # All text: "64.20" stays as it is printed.
        tables: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
        if name not in tables:
            raise ConfigError(f"{name}: {paper.name} has {', '.join(tables)}.")
        content, self._reader = tables[name], Reader(paper)
        scales = ["paper", *(s for s in ("middle", "reduced") if self._reader.path(s))]
        if scale not in scales:
            raise ConfigError(f"--scale {scale}: {paper.name} has {', '.join(scales)}.")
        self.paper, self.name, self.scale = paper, name, scale
        self.title: str = content["title"]
        self.about: str = content["about"]
        self.sections: str = content.get("sections", "columns")
        self.cost: dict[str, str] = content.get("cost", {})
        self.columns = {column: _entry(value) for column, value in content["columns"].items()}
        self.rows = {row: _entry(value) for row, value in content["rows"].items()}
        self.printed: dict[str, list[str]] = content.get("printed", {})
        self._first: dict[str, list[str]] = content.get("first", {})
        self._runs: dict[tuple[str, ...], Run] = {}
        wrong = [row for row, numbers in self.printed.items() if len(numbers) != len(self.columns)]
        if wrong:
            raise ConfigError(
                f"{path}: {name}: printed: {wrong[0]} needs a number for each of {len(self.columns)} columns."
            )

    def stands_for(self, row: str) -> str:
        """Return the printed row that a row is beside: itself, or another one."""
        return self.rows[row].get("as", row)

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell."""
        entry = {**self.rows[row], **self.columns[column]}
        parts = [*self.rows[row].get("run", []), *self.columns[column].get("run", [])]
        scale = [] if self.scale == "paper" else [self.scale]
        words = {key: value for key, value in entry.items() if isinstance(value, str)}
        parts = [filled for part in [*parts, *scale, *entry.get("over", [])] if (filled := part.format(**words))]
        numbers = self.printed.get(self.stands_for(row))
        show = entry.get("show", "accuracy")
        return Cell(
            row,
            column,
            numbers[list(self.columns).index(column)] if numbers else "",
            None if show == "nothing" else self._run(tuple(parts)),
            show,
            entry.get("model"),
            tuple(map(int, entry["clients"])) if "clients" in entry else None,
        )

    def _run(self, parts: tuple[str, ...]) -> Run:
        return self._runs.setdefault(parts, Run(self.scale, parts, self._reader))

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
    entry = dict(value) if isinstance(value, dict) else {"run": value}
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


def _set(whole: dict[str, Any], option: str, value: Any) -> None:
    """Set an option in place, named as on the command line: the ``init_args`` of a class are left out."""
    names = option.split(".")
    for name, following in itertools.pairwise(names):
        whole = whole.setdefault(name, {})
        if "class_path" in whole and following != "class_path":
            whole = whole.setdefault("init_args", {})
    whole[names[-1]] = value
