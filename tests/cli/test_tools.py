"""Commands beside Lightning's: one module each, looked up by name."""

import argparse
import sys
from types import ModuleType

import pytest

from lit_pfl.cli import main
from lit_pfl.cli.tools import TOOLS
from lit_pfl.errors import ConfigError


@pytest.fixture
def greet(monkeypatch):
    """A command that greets by name, and knows nobody called Nobody."""
    tool = ModuleType("greet", "Greet somebody.")
    tool.add_options = lambda parser: parser.add_argument("names", nargs="+")

    def run(options: argparse.Namespace) -> None:
        if "Nobody" in options.names:
            raise ConfigError("names: nobody is\n called Nobody.")
        print("Hello", *options.names)

    tool.run = run
    monkeypatch.setitem(sys.modules, "greet", tool)
    monkeypatch.setitem(TOOLS, "greet", ("greet", "say hello"))


def test_a_tool_is_called_with_its_options(greet, capsys):
    main(["greet", "Ada", "Emmy"])
    assert capsys.readouterr().out == "Hello Ada Emmy\n"


def test_the_overview_names_it(greet, capsys):
    main(["--help"])
    assert "  greet      say hello\n" in capsys.readouterr().out


def test_its_help_has_its_description(greet, capsys):
    with pytest.raises(SystemExit):
        main(["greet", "--help"])
    assert "Greet somebody." in capsys.readouterr().out


@pytest.mark.parametrize(("args", "said"), [(["Nobody"], "nobody is called Nobody"), ([], "required: names")])
def test_what_is_wrong_is_said_in_one_line(greet, capsys, args, said):
    with pytest.raises(SystemExit) as stop:
        main(["greet", *args])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
