"""What callbacks of a federation's own Trainer wait for."""

from collections.abc import Collection
from difflib import get_close_matches

import lightning as L

from lit_pfl.engines.validation import monitors
from lit_pfl.errors import ConfigError


def refuse_misspelt(trainer: L.Trainer, known: Collection[str]) -> None:
    """See that no callback monitors what is nearly the name of a metric, but is none.

    Of other names nobody knows before the first round's end: another callback may log them.

    Args:
        trainer: the federation's.
        known: the metrics that the federation will log.

    Raises:
        ConfigError: when one does.
    """
    for name, callback in monitors(trainer).items():
        if name not in known and (near := get_close_matches(name, known, n=1, cutoff=0.7)):
            raise ConfigError(
                f"trainer.callbacks: {callback}(monitor={name}): there is no such metric. Did you mean {near[0]}? "
                f"There are {', '.join(sorted(known))}."
            )
