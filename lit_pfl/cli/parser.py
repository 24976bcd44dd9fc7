"""The parser of the command line: fragments, defaults, errors in one line."""

from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_pfl.cli.config_files import ConfigFile
from lit_pfl.cli.messages import explained, fail


class Parser(LightningArgumentParser):
    """Reads configuration files with their fragments, and says what is wrong in one line."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; one for configuration files reads fragments too."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = ConfigFile
        return super().add_argument(*args, **kwargs)

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
