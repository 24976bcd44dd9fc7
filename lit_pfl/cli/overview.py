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
PACKAGE = Path(__file__).parent.parent
OVERVIEW = """\
usage: lit-pfl COMMAND [options]

Personalized federated learning: clients learn together without sharing data, each ends with a model of its own.

  fit        train a federation, round by round, into a run folder of its own
  validate   score a checkpoint on every client's validation data
  test       score a checkpoint on every client's test data
  predict    write a checkpoint's prediction for every test sample
{tools}
Methods (--model):
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
            methods=textwrap.fill(", ".join(methods()), 100, initial_indent="  ", subsequent_indent="  "),
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
    """Return the names that ``lit_pfl.methods`` exports, read from its source: importing it takes seconds."""
    tree = ast.parse((PACKAGE / "methods" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError("lit_pfl/methods/__init__.py has no __all__")
