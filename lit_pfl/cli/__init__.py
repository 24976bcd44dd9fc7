"""The command line: ``lit-pfl fit|validate|test|predict``, and the tools next to them."""

import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING

from lit_pfl.cli.overview import answer, no_command
from lit_pfl.cli.tools import TOOLS, run_tool

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType

#: how often a thread looks whether the others are ready before it gives its core away. By default, GNU's OpenMP looks
#: 300,000 times: if another process has one of two cores, a step on two threads then takes up to seven times longer
SPINS = "10000"


def main(args: "ArgsType" = None) -> None:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no run ends for a sign that a terminal does not have
    try:
        _answer_or_run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer_or_run(args: "ArgsType") -> None:
    words = sys.argv[1:] if args is None else args
    text = answer(words)
    if text is not None:
        print(text)
        return
    if wrong := no_command(words):
        print(f"lit-pfl: error: {wrong}", file=sys.stderr)
        sys.exit(2)
    if isinstance(words, list) and words[0] in TOOLS:
        run_tool(words[0], words[1:])
        return
    if "OMP_WAIT_POLICY" not in os.environ:  # read when PyTorch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from lit_pfl.cli.run import run  # Lightning takes seconds to import, and an answer does without

    run(args)
