"""List the methods by family, with one line each; or those whose line has a word, such as head or optimizer."""

import argparse

from lit_pfl.cli.overview import families
from lit_pfl.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="Word to look for. Default: list all.")


def run(options: argparse.Namespace) -> None:
    """List."""
    word, listed = options.word.lower(), families()
    width = max(len(name) for members in listed.values() for name in members)
    lines = []
    for family, members in listed.items():
        found = [f"  {name:<{width}}  {about}" for name, about in members.items() if word in f"{name} {about}".lower()]
        lines += [family, *found, ""] if found else []
    if not lines:
        raise ConfigError(f"methods: no method's name or line has {options.word!r}; `lit-pfl methods` lists all.")
    print("\n".join(lines))
    print("All options of one: lit-pfl fit --model.help NAME. Run one: lit-pfl fit --model NAME --data Digits")
