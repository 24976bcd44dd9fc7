"""Runs as they lie in their folders, and which of them differ in nothing but the seed."""

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.run_folder import read_rows

Row = dict[str, Any]
SEED = "seed_everything"
#: columns of CSV files that hold words; all others hold numbers
WORDS = frozenset({"split", "model", "state", "label", "predicted", "direction", "group", "phase", "layer"})
#: columns that hold whole numbers
WHOLE = frozenset({"round", "client", "other", "class", "count"})


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        folder: its folder. ``metrics.csv`` is there; everything else may be.
        options: what made it, by name as it is typed; empty where nobody knows.
    """

    folder: Path
    options: Mapping[str, Any]

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every round, by name, those that it has."""
        rows = self.table("metrics.csv")
        try:
            return [{name: float(value) for name, value in row.items() if value} for row in rows]
        except ValueError as error:
            raise ConfigError(f"runs: {self.folder}/metrics.csv: {error}.") from None

    @property
    def seed(self) -> int | None:
        """The seed of its initial weights and draws; None where nobody knows, or where it was told to have none."""
        seed = self.options.get(SEED)
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def rounds(self) -> int:
        """Number of rounds so far."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def finished(self) -> bool:
        """Whether all its rounds are there, or it was ended before, and so its last round is tested.

        A run without validation data is tested in every round, which does not say that it has ended.
        """
        wanted = self.options.get("trainer.max_epochs")
        tested = any(name.startswith("test/") for row in self.metrics[-1:] for name in row)
        if not isinstance(wanted, int) or wanted < 0:
            return tested
        validated = any(name.startswith("val/") for row in self.metrics for name in row)
        return self.rounds >= wanted or (tested and validated)

    def last(self, name: str) -> list[float]:
        """Return a metric after the last round, nothing where it is not there."""
        return [row[name] for row in self.metrics[-1:] if name in row]

    def table(self, name: str, *columns: str, empty: Collection[str] = ()) -> list[Row]:
        """Return the rows of one of its CSV files, none where there is no such file.

        Args:
            name: the file.
            columns: what it must have.
            empty: columns of numbers that may be empty, and need not be there unless they are among ``columns``.

        Raises:
            ConfigError: when it is none, or has not these columns, or no numbers in them.
        """
        try:
            rows = read_rows(self.folder / name)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"runs: {self.folder / name} is not a CSV file: {error}.") from None
        if rows and ";" in (next(iter(rows[0])) or ""):
            raise ConfigError(f"runs: {self.folder / name} has semicolons between its columns; write commas.")
        if any(None in row for row in rows):
            raise ConfigError(f"runs: {self.folder / name} has a line of more columns than its first; take it away.")
        for column in columns:
            if rows and column not in rows[0]:
                raise ConfigError(f"runs: {self.folder / name} has no column {column!r}; take the file away.")
        for column in {*columns, *empty} - WORDS:
            for row in rows:
                value = row.get(column)
                if not _is_number(value) and (value or column not in empty):
                    raise ConfigError(
                        f"runs: {self.folder / name} has {value!r} as {column!r}, which must be a number; take that "
                        "line away."
                    )
                if column in WHOLE and value:
                    row[column] = self._whole(name, column, value)
        return rows

    def _whole(self, name: str, column: str, value: str) -> str:
        number = float(value)
        if not number.is_integer():  # infinite or none at all, too
            raise ConfigError(
                f"runs: {self.folder / name} has {value!r} as {column!r}, which must be a whole number; take that line "
                "away."
            )
        return str(int(number))


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Args:
        name: what sets it apart from the other groups: the method, and options where that does not tell.
        runs: the runs, at least one; one of every seed that is known.
        copies: others of the same seeds, which do not count.
    """

    name: str
    runs: Sequence[Run]
    copies: Sequence[Run] = ()

    @property
    def options(self) -> Mapping[str, Any]:
        """What made the first of the runs."""
        return self.runs[0].options

    def by_seed(self, name: str) -> dict[Any, float]:
        """Return a metric after the last round, by seed; of runs that have both."""
        return {run.seed: value for run in self.runs if run.seed is not None for value in run.last(name)}

    def last(self, name: str) -> list[float]:
        """Return a metric after the last round, of every run that has it."""
        return [value for run in self.runs for value in run.last(name)]


def check(runs: Sequence[Run]) -> None:
    """See that there is something to report on.

    Raises:
        ConfigError: at the first run of which no round is there, or where there is no run.
    """
    if not runs:
        raise ConfigError("runs: no run folder was found; give one that holds a metrics.csv.")
    for run in runs:
        if not run.metrics:
            raise ConfigError(f"runs: {run.folder} has no round in its metrics.csv; leave it out.")
        if any("round" not in row for row in run.metrics):
            raise ConfigError(f"runs: {run.folder}/metrics.csv has no 'round' in every line; leave it out.")
        if not all(row["round"].is_integer() for row in run.metrics):
            raise ConfigError(f"runs: {run.folder}/metrics.csv has a 'round' that is not a whole number; leave it out.")


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in nothing but the seed, in the order in which they come.

    Of several with one seed the last one counts.
    """
    together: dict[str, list[Run]] = {}
    for run in runs:
        made_by = {name: value for name, value in run.options.items() if name != SEED}
        together.setdefault(repr(sorted(made_by.items())) if made_by else str(run.folder), []).append(run)
    groups = list(together.values())
    names = _names([group[0] for group in groups])
    return [_each_seed_once(name, group) for name, group in zip(names, groups, strict=True)]


def _each_seed_once(name: str, runs: Sequence[Run]) -> Group:
    last = {run.seed: run for run in runs}
    counted = [run for run in runs if run.seed is None or run is last[run.seed]]
    return Group(name, counted, [run for run in runs if run not in counted])


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of those options that have not the same value everywhere, except for the seed.

    A run without any options tells of no difference: nobody knows what made it.
    """
    known = [one for one in options if one]
    names = dict.fromkeys(name for one in known for name in one)
    return [
        name for name in names if name != SEED and any(name not in o or o[name] != known[0].get(name) for o in known)
    ]


def short(value: Any) -> str:
    """Write an option's value for people: a class by its name, the rest as in YAML."""
    if isinstance(value, list):
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, dict) and "class_path" in value:
        options = ", ".join(f"{name}={short(one)}" for name, one in (value.get("init_args") or {}).items())
        return short(value["class_path"]) + (f"({options})" if options else "")
    if isinstance(value, str):
        return value.rpartition(".")[2] if value.replace(".", "").replace("_", "").isalnum() else value
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _names(runs: Sequence[Run]) -> list[str]:
    """Name runs by method and by what else differs; a method's own options only among runs of that method."""
    names = []
    elsewhere = [name for name in differing([run.options for run in runs]) if not name.startswith("model")]
    for run in runs:
        if "model" not in run.options:
            names.append(run.folder.resolve().name)
            continue
        same = [other.options for other in runs if other.options.get("model") == run.options["model"]]
        told = [name for name in [*differing(same), *elsewhere] if name in run.options]
        parts = [f"{name.removeprefix('model.')}={short(run.options[name])}" for name in dict.fromkeys(told)]
        names.append(", ".join([short(run.options["model"]), *parts]))
    return [name if names.count(name) == 1 else f"{name} ({run.folder})" for name, run in zip(names, runs, strict=True)]
