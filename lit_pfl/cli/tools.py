"""Commands next to Lightning's own, such as those that look at runs which are over. Each is a file of its own."""

import argparse
import importlib
from typing import Any

#: by the command's name: its module, and what it does, for the overview. The module has ``add_options(parser)`` and
#: ``run(options)``; its docstring is the command's description.
TOOLS: dict[str, tuple[str, str]] = {
    "compare": ("lit_pfl.cli.compare", "run several methods with several seeds, and compare them"),
    "configs": ("lit_pfl.cli.configs", "list the configurations that come with lit-pfl, or copy one"),
    "methods": ("lit_pfl.cli.methods", "list the methods by family, with one line each"),
    "report": ("lit_pfl.cli.report", "show runs as a page of charts and tables"),
    "export": ("lit_pfl.cli.export", "write a client's model for use without this library"),
}


def run_tool(name: str, args: list[str]) -> None:
    """Run a command.

    Args:
        name: one of ``TOOLS``.
        args: what was typed after it.
    """
    from lit_pfl.errors import ConfigError  # here, so that an overview does without PyTorch

    tool: Any = importlib.import_module(TOOLS[name][0])
    parser = argparse.ArgumentParser(prog=f"lit-pfl {name}", description=tool.__doc__)
    tool.add_options(parser)
    try:
        tool.run(parser.parse_args(args))
    except BrokenPipeError:
        raise
    except (ConfigError, OSError) as error:
        parser.exit(2, f"lit-pfl: error: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130)
