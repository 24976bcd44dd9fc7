"""The parser of the command line: fragments, defaults, errors in one line."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_pfl.cli.config_files import CONFIG, with_fragments
from lit_pfl.cli.messages import CLASSES, explained, fail


class ConfigFile(ActionConfigFile):
    """Reads a configuration file, and before it its ``fragments``: the files that it builds on, by relative paths."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read."""
        for file in with_fragments(values):
            super().__call__(parser, cfg, file, option_string)
            if cfg.get("fragments"):
                cfg["fragments"] = None  # they are read: the configuration that is saved is whole without them


class Parser(LightningArgumentParser):
    """Reads configuration files with their fragments, and says what is wrong in one line."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; one for configuration files reads fragments too."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = ConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Parse arguments, in which a class may stand behind its options."""
        return super().parse_args(names_first(sys.argv[1:] if args is None else args), *more, **kwargs)

    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """Return the defaults: a data set without its options, else another one chosen in its place would get them."""
        defaults = super().get_defaults(*args, **kwargs)
        if "data" in defaults:
            defaults["data"].pop("init_args", None)
        return defaults

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:  # one of several readings of a value that are tried out
            super().error(message, ex)
        fail(explained(message, self.options()))

    def options(self) -> list[str]:
        """Return the names of all options, also those of the commands within."""
        own = [action.dest for action in self._actions if action.option_strings]
        commands = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return own + [name for parsers in commands for parser in parsers.values() for name in parser.options()]


def names_first(words: Sequence[str]) -> list[str]:
    """Return arguments in which every class comes before its options, as the parser needs it.

    ``--model.backbone MLP --model FedAvg`` would be a method called MLP. A configuration file is not passed: what is
    typed behind it goes before what it says.

    Args:
        words: the arguments as they were typed.
    """
    arguments: list[list[str]] = [[]]  # each option with its values; first what stands before them all
    for word in words:
        if word.startswith("--") or word in CONFIG:
            arguments.append([])
        arguments[-1].append(word)
    ordered: list[tuple[str, list[str]]] = []
    since = 0  # the last configuration file
    for argument in arguments:
        option = "".join(argument[:1]).partition("=")[0]
        place = len(ordered)
        if option.lstrip("-").rpartition(".")[2] in CLASSES:
            later = range(since, len(ordered))
            place = next((i for i in later if f"{ordered[i][0]}.".startswith(f"{option}.")), place)
            if place < len(ordered) and ordered[place][0] == option:  # named before: this is another choice
                place = len(ordered)
        ordered.insert(place, (option, argument))
        if option in CONFIG:
            since = len(ordered)
    return [word for _, argument in ordered for word in argument]
