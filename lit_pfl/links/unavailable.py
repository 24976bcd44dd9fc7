"""Options of a Federation that links between machines do not have."""

from collections.abc import Iterable

from lit_pfl.errors import ConfigError

SIMULATED = ("deadline", "asynchronous")


def refuse_unavailable(given: Iterable[str], spelt: str, waits: str) -> None:
    """Refuse options that would otherwise be ignored.

    Args:
        given: names of options.
        spelt: how an option is named in a message, with ``{}`` for its name.
        waits: how long rounds take here.

    Raises:
        ConfigError: for the first one that this link does not have.
    """
    for name in given:
        if name in SIMULATED:
            raise ConfigError(f"{spelt.format(name)}: only a Federation has simulated time. {waits}")
        if name == "privacy":
            raise ConfigError(
                f"{spelt.format(name)}: only a Federation protects uploads. Train with a private optimizer instead, "
                "as Opacus makes them."
            )
