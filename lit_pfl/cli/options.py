"""The options of a run by name, as written to files, given to loggers and compared when a run is resumed."""

from fnmatch import fnmatch
from typing import Any

from lit_pfl.errors import ConfigError

#: what may change when a run goes on: where and how it computes, how long, and what is shown and kept of it
MAY_CHANGE = (
    "trainer*",
    "data.root",
    "data.download",
    "data.verify",
    "data.eval_batch_size",
    "federation.threads",
    "federation.engine*",
    "federation.quorum",
    "federation.privacy.accountant",
    "federation.privacy.budget",
    "federation.privacy.delta",
    "federation.if_not_saved",
)
#: of these, what makes other numbers all the same
MUST_STAY = (
    "trainer.precision",
    "trainer.limit_train_batches",
    "trainer.overfit_batches",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_*",
)
#: arguments of one command, not of a run
OF_A_COMMAND = ("config", "folder", "fragments", "ckpt_path", "weights_only", "verbose", "return_predictions")


def of_a_run(config: dict[str, Any]) -> dict[str, Any]:
    """Return a command's configuration without what only concerns that command."""
    return {key: value for key, value in config.items() if key not in OF_A_COMMAND}


def by_name(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options by the names under which they are typed: ``{"model": "...SimFed", "model.tau": 0.9}``."""
    named: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            named[name] = value
            return
        if "class_path" in value:
            named[name] = value["class_path"]
            value = _arguments(value, name)
        for key, inner in value.items():
            add(f"{name}.{key}", inner)

    for key, value in config.items():
        add(str(key), value)
    return named


def nested(config: Any) -> Any:
    """Return the options as loggers hold them: ``{"model": {"class": "SimFed", "tau": 0.9}}``."""
    if isinstance(config, list):
        return [nested(value) for value in config]
    if not isinstance(config, dict):
        return config
    if "class_path" in config:
        options = _arguments(config, config["class_path"])
        return {"class": config["class_path"].rpartition(".")[2], **nested(options)}
    return {key: nested(value) for key, value in config.items()}


def _arguments(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of a class, together."""
    found: dict[str, Any] = {}
    for part in ("init_args", "dict_kwargs"):
        arguments = config.get(part) or {}
        if not isinstance(arguments, dict):
            raise ConfigError(f"{name}.{part}={arguments!r}: give options by their names.")
        found |= arguments
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options of which two runs have not the same value, with both, in the order of the second.

    One that a run does not have is None: it was written by a version without that option, or of another class.
    """
    values = {name: (before.get(name), now.get(name)) for name in dict.fromkeys([*now, *before])}
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


def may_change(name: str) -> bool:
    """Say whether a run may continue another value of an option."""

    def among(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    return among(MAY_CHANGE) and not among(MUST_STAY)
