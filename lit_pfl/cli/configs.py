"""List the configurations that come with lit-pfl, or copy one into the current folder to change it."""

import argparse
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path

from lit_pfl.cli.config_files import ENDING, FOLDER, hint, names
from lit_pfl.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="Configuration to copy, such as simfed, or folder to list, such as paper. Default: list all.",
    )


def run(options: argparse.Namespace) -> None:
    """List, or copy."""
    name = options.name.removeprefix("configs/").removesuffix(ENDING).rstrip("/")
    within = [one for one in names() if one.startswith(f"{name}/") or not name]
    if name in names():
        file = Path(f"{name.rpartition('/')[2]}{ENDING}")
        try:
            with file.open("x", encoding="utf-8") as copy:
                copy.write(copied(name))
        except FileExistsError:
            raise ConfigError(f"configs: {file} already exists in this folder; rename or move it first.") from None
        print(f"Copied to {file}. Run it: lit-pfl fit --config {file}")
    elif within:
        print("\n".join(listing(within, name)))
        print("\nRun one with `lit-pfl fit --config NAME`. Copy one into this folder with `lit-pfl configs NAME`.")
    else:
        raise ConfigError(f"configs: there is no configuration {name!r}. {hint(name)}")


def listing(within: list[str], folder: str) -> list[str]:
    """Return one line for each configuration in a folder and its subfolders, and one for each deeper folder.

    Args:
        within: names of all configurations in the folder, however deep.
        folder: name of the folder; empty for the top folder.
    """
    level = folder.count("/") + 1 if folder else 0
    near = [name for name in within if name.count("/") <= level + 1]
    deep = Counter("/".join(name.split("/")[: level + 1]) for name in within if name not in near)
    lines = {name: about(name) for name in near}
    lines |= {f"{above}/": f"{count} more: lit-pfl configs {above}" for above, count in deep.items()}
    width = max(map(len, lines))
    return [f"{name:<{width}}  {text}" for name, text in lines.items()]


def about(name: str) -> str:
    """Return the first sentence of the comment that a configuration begins with."""
    lines = (FOLDER / f"{name}{ENDING}").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[2:] for line in takewhile(re.compile(r"# \S").match, lines))
    return re.split(r"\.\s+(?=[A-Z])", comment)[0].rstrip(".:")  # not at "Fig. 7"


def copied(name: str) -> str:
    """Return the text of a configuration for any folder, with fragments under names that are found everywhere."""
    source = FOLDER / f"{name}{ENDING}"

    def anywhere(fragment: re.Match[str]) -> str:
        return (source.parent / fragment[0]).resolve().relative_to(FOLDER).as_posix()

    def line(found: re.Match[str]) -> str:
        return re.sub(rf"[\w./-]+{ENDING}", anywhere, found[0])

    return re.sub(r"^fragments: .*$", line, source.read_text(encoding="utf-8"), flags=re.MULTILINE)
