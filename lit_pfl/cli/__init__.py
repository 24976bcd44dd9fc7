"""The command line: ``lit-pfl fit|validate|test|predict``."""

import sys
from typing import TYPE_CHECKING

from lit_pfl.cli.overview import answer

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType


def main(args: "ArgsType" = None) -> None:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.
    """
    text = answer(sys.argv[1:] if args is None else args)
    if text is not None:
        print(text)
        return
    from lit_pfl.cli.command import run  # Lightning takes seconds to import, and an answer does without

    run(args)
