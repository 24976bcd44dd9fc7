"""With what a client's optimizers and schedules were made: a client that is resumed has the checkpoint's."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.errors import ConfigError


def made_with(trainer: L.Trainer) -> dict[str, str]:
    """Return the classes of a Trainer's optimizers and schedules, and their plain options, by name.

    What single parameter groups are given is not among them: callbacks may have added groups.
    """
    return {name: str(value) for name, value in _options(trainer) if _is_plain(value)}


def _options(trainer: L.Trainer) -> Iterator[tuple[str, Any]]:
    optimizers = [(one, one.defaults) for one in trainer.optimizers]
    schedules = [(one.scheduler, one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs]
    for kind, several in (("optimizer", optimizers), ("scheduler", schedules)):
        yield kind, ", ".join(type(one).__name__ for one, _ in several) or "none"
        for number, (_, options) in enumerate(several):
            name = f"{kind} {number + 1}" if len(several) > 1 else kind
            yield from ((f"{name}.{key}", value) for key, value in options.items() if not key.startswith("_"))


def _is_plain(value: Any) -> bool:
    several = value if isinstance(value, list | tuple | Counter) else [value]  # milestones are counted
    return all(one is None or isinstance(one, bool | int | float | str) for one in several)


def continued(before: Mapping[str, str], now: Mapping[str, str], said: set[str]) -> dict[str, str]:
    """Return with what the optimizers of a resumed client were made, and say where something else is given.

    Args:
        before: what :func:`made_with` returned in the run that wrote the checkpoint; empty where that is not known.
        now: what it returns before the checkpoint is loaded.
        said: what has been said already; it is added to.

    Raises:
        ConfigError: for other classes of optimizers or schedules, or another number of them, which cannot continue from
            the others' state.
    """
    both = [name for name in now if before.get(name, now[name]) != now[name]]
    for name in both:
        if "." not in name:
            raise ConfigError(f"model.{name}: the checkpoint is of a run with {before[name]}, not {now[name]}.")
    differing = ", ".join(f"{name}={before[name]} (not {now[name]})" for name in both)
    if differing and differing not in said:
        said.add(differing)
        rank_zero_warn(
            f"Clients continue with what the checkpoint has, as in Lightning: {differing}. To change it, set it in a "
            "hook of the learner, or begin another run."
        )
    return {**now, **before}
