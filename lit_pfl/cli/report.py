"""Show runs: one page to read, with nothing to load, and its pictures as SVG and PNG for papers.

Runs that differ in the seed only are taken together; what else differs in their configurations names them.
"""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_pfl.cli.options import by_name, may_change, of_a_run
from lit_pfl.errors import ConfigError
from lit_pfl.report import Run, check, grouped, main_metric
from lit_pfl_callbacks.run_folder import latest_config

#: of the options that may change while a run goes on, those that make a difference to what it came to
DIFFERENT = (
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.callbacks",  # attacks are among them
    "federation.quorum",
    "federation.privacy.budget",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="A run folder, or a folder that contains some, at any depth."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="HTML file to write. Default: report.html in the folder that contains all given runs.",
    )
    parser.add_argument(
        "--no_pictures",
        action="store_true",
        help="Omit SVG and PNG files, which are written to a folder next to the page.",
    )


def run(options: argparse.Namespace) -> None:
    """Write a report, and say where it is."""
    require_charts()
    found = [folder for given in options.runs for folder in run_folders(given)]
    folders = list({folder.resolve(): folder for folder in found}.values())
    output = options.output or Path(os.path.commonpath([folder.absolute() for folder in folders])) / "report.html"
    print(write_report([read(folder) for folder in folders], output, pictures=not options.no_pictures))


def require_charts() -> None:
    """See that the charting library is there.

    Raises:
        ConfigError: when it is not.
    """
    if not all(map(importlib.util.find_spec, ("altair", "vl_convert"))):
        raise ConfigError("A report needs Altair and vl-convert: pip install 'lit-pfl[report]'.")


def run_folders(given: Path) -> list[Path]:
    """Return a folder if it is a run's, else those within.

    Raises:
        ConfigError: when there is none.
    """
    if not given.is_dir():
        raise ConfigError(f"runs: there is no folder {given}.")
    found = sorted(path.parent for path in given.rglob("metrics.csv"))
    found = [given] if given in found else found
    if not found:
        raise ConfigError(f"runs: neither {given} nor a folder in it holds a metrics.csv, which every run has.")
    return found


def read(folder: Path) -> Run:
    """Return a run with the options that make a difference to it.

    Raises:
        ConfigError: when its configuration is not YAML, or not one of a run.
    """
    path = latest_config(folder)
    try:
        config: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"runs: {path} is not YAML: {error}") from None
    try:
        named = by_name(of_a_run(config if isinstance(config, dict) else {}))
    except ConfigError as error:
        raise ConfigError(f"runs: {path}: {error}") from None
    return Run(folder, {name: value for name, value in named.items() if name in DIFFERENT or not may_change(name)})


def write_report(runs: Sequence[Run], output: Path, pictures: bool = True) -> Path:
    """Write the report of some runs.

    Args:
        runs: the runs.
        output: the page's file, ``.html`` if it has no ending; the pictures go to a folder of the same name without it.
        pictures: whether there are any.

    Raises:
        ConfigError: when there is nothing to report on, or when the page has no name.
    """
    from lit_pfl.report import page  # needs what not everybody has installed

    check(runs)
    if output.name in ("", ".."):
        raise ConfigError(f"--output={output}: that is a folder; give the name of a file in it.")
    output = output if output.suffix else output.with_suffix(".html")
    page.write(grouped(runs), main_metric(runs), output, output.with_suffix("") if pictures else None)
    return output
