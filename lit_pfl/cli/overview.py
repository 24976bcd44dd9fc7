"""What ``lit-pfl``, ``lit-pfl --help`` and ``lit-pfl --version`` print. Imports nothing that takes time."""

import ast
import textwrap
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lit_pfl.cli.tools import TOOLS

#: Lightning's commands
TRAINERS = ("fit", "validate", "test", "predict")
METHODS = Path(__file__).parent.parent / "methods"
OVERVIEW = """\
usage: lit-pfl COMMAND [options]

Personalized federated learning: clients learn together without sharing data, each ends with a model of its own.

  fit        train a federation, round by round, into a run folder of its own
  validate   score a checkpoint on every client's validation data
  test       score a checkpoint on every client's test data
  predict    write a checkpoint's prediction for every test sample
{tools}
Methods (--model), with one line each in `lit-pfl methods`:
{methods}

An example, half a minute on a laptop, with data that comes along:

  lit-pfl fit --model FedAvg --data Digits --data.num_clients 5 --model.backbone MLP --trainer.max_epochs 3

Or with one of the configurations that `lit-pfl configs` lists, or a file of your own:

  lit-pfl fit --config simfed

Then, with the folder that it names:

  lit-pfl test --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt

All options: lit-pfl fit --help; those of a class: lit-pfl fit --model.help SimFed.
  -h, --help   show this
  --version    show the version"""


def answer(args: Any) -> str | None:
    """Return what to print where the arguments ask for help as a whole, or for the version; None where they do not."""
    if args in ([], ["-h"], ["--help"]):
        return OVERVIEW.format(
            tools="".join(f"  {name:<10} {text}\n" for name, (_, text) in TOOLS.items()),
            methods="\n".join(
                f"  {family}:\n{textwrap.indent(textwrap.fill(', '.join(members), 96), '    ')}"
                for family, members in families().items()
            ),
        )
    return f"lit-pfl {version('lit-pfl')}" if args == ["--version"] else None


def no_command(args: Any) -> str | None:
    """Return what is wrong with the first word if it is to be a command, and none; None where it is one."""
    word, commands = args[0] if isinstance(args, list) else "-", [*TRAINERS, *TOOLS]
    if word in commands or word.startswith("-"):
        return None
    near = get_close_matches(word, commands, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no command {word!r}; choose one of {', '.join(commands)}.{hint}"


def methods() -> list[str]:
    """Return the names of all methods, in families."""
    return [name for members in families().values() for name in members]


def families() -> dict[str, dict[str, str]]:
    """Return the methods by family: what a family has in common, then each method's name and what its file says of it.

    All is read from the sources: importing them takes seconds.
    """
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse((METHODS / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            family, file = node.module.split(".")[-2:]
            about = first_line(METHODS / family / f"{file}.py").partition(": ")
            members = found.setdefault(first_line(METHODS / family / "__init__.py"), {})
            members |= dict.fromkeys((alias.name for alias in node.names), about[2] or about[0])
    return found


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    with file.open(encoding="utf-8") as lines:
        return next(lines).strip().strip('"').rstrip(".")
