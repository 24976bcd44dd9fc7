"""The command line as tests use it: what is typed, what comes, what a folder holds."""

import csv
from pathlib import Path
from typing import NamedTuple

from lit_pfl.cli import main

ROOT = Path(__file__).parent.parent.parent
TINY = ["--config", str(ROOT / "tests/conf/tiny.yaml")]


class Came(NamedTuple):
    """What came of a command: the exit code, what was printed, and the lines that say what was wrong."""

    code: int | str | None
    out: str
    errors: list[str]


def typed(capsys, *words: str) -> Came:
    """Run the command line."""
    capsys.readouterr()
    code: int | str | None = 0
    try:
        main(list(words))
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return Came(code, printed.out, [line for line in printed.err.splitlines() if line.startswith("lit-pfl: error: ")])


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, bit for bit; the folders within too."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
