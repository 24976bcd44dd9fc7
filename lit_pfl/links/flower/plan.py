"""What a run of Flower is configured with."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from lit_pfl.core.checks import check_quorum
from lit_pfl.errors import ConfigError
from lit_pfl.links.unavailable import refuse_unavailable
from lit_pfl.randomness import check_share


@dataclass(frozen=True)
class Plan:
    """The options of a run: ``[tool.flwr.app.config]`` of the project's pyproject.toml and ``flwr run --run-config``.

    There they are spelt with hyphens: ``local-epochs``. Other options of a project are its own.

    Args:
        clients: number of clients; the first round waits for all of them.
        rounds: number of rounds.
        local_epochs: epochs that a client trains in a round; 0 for as few as the method can do with.
        participation: who trains in a round, see :class:`~lit_pfl.Federation`.
        quorum: the share of a round's uploads that must be usable.
        seed: seed of everything random.
        threads: CPU threads of a client; 0 to choose by the work.
        timeout: seconds that the server waits for the nodes of a round, and for clients to join.
        folder: the server's folder for the checkpoint and what is logged. A run that finds its checkpoint there goes
            on from it.
    """

    clients: int
    rounds: int
    local_epochs: int = 0
    participation: float = 1.0
    quorum: float = 0.5
    seed: int = 0
    threads: int = 0
    timeout: float = 600.0
    folder: str = "federation"

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("rounds", 1), ("local_epochs", 0), ("seed", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"run-config {_spelt(name)}={getattr(self, name)}: must be {least} or more.")
        check_quorum("run-config quorum", self.quorum)
        if not self.timeout > 0:
            raise ConfigError(f"run-config timeout={self.timeout}: give a number of seconds.")
        check_share("run-config participation", self.participation, self.clients)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Plan":
        """Return the plan in a run's configuration.

        Raises:
            ConfigError: when an option is missing, not of its type, or one that only a Federation has.
        """
        names = (name.partition(".")[0] for name in config)
        waits = "Here, a round waits for its clients in real time, run-config timeout seconds at most."
        refuse_unavailable(names, "run-config {}", waits)
        types = get_type_hints(cls)
        options: dict[str, Any] = {}
        for field in fields(cls):
            name, kind = _spelt(field.name), types[field.name]
            if name not in config:
                if field.default is MISSING:
                    raise ConfigError(f"run-config {name} is not given; add it to [tool.flwr.app.config].")
                continue
            value = float(config[name]) if kind is float and type(config[name]) is int else config[name]
            if type(value) is not kind:
                raise ConfigError(f"run-config {name}={value!r}: give a value of type {kind.__name__}.")
            options[field.name] = value
        return cls(**options)


def _spelt(name: str) -> str:
    return name.replace("_", "-")
