"""Is a checkpoint one of the run that is asked for, and where does it lie."""

import os
from pathlib import Path
from typing import Any

from lit_pfl.cli.options import differences, may_change
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import read_checkpoint

#: the options that make a difference to a model that is only scored
OF_A_MODEL = ("model", "data")


def saved_record(path: Path, weights_only: bool) -> dict[str, Any] | None:
    """Return what the run that wrote a checkpoint has recorded of itself, such as its ``options`` by name.

    None where it was written from Python.

    Raises:
        ConfigError: when the file is no whole checkpoint.
    """
    callbacks = read_checkpoint(path, weights_only, mmap=True).get("callbacks")
    record = callbacks.get("RunRecord") if isinstance(callbacks, dict) else None
    return record if isinstance(record, dict) and isinstance(record.get("options"), dict) else None


def taken(before: dict[str, Any], now: dict[str, Any], scoring: bool) -> dict[str, tuple[Any, Any]]:
    """Return the options that are taken although they differ from the checkpoint's, with both values.

    Args:
        before: the options of the run that wrote the checkpoint, by name.
        now: those given.
        scoring: whether the model is only to be scored, so that only what makes it and its data must agree.

    Raises:
        ConfigError: for the first one that makes it another run.
    """
    differing = differences(before, now)
    for name, (old, new) in differing.items():
        if not may_change(name) and (not scoring or name.split(".")[0] in OF_A_MODEL):
            raise ConfigError(
                f"{name}={new}: the run that wrote the checkpoint has {name}={old}. Give that, or "
                f"{'score another run' if scoring else 'begin a run of its own, without --ckpt_path'}."
            )
    return differing


def folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, so that the run goes on there; None if in none."""
    folder = checkpoint.absolute().parent.parent
    if not (folder / "metrics.csv").exists() and not (folder / "config.yaml").exists():
        return None
    return Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
