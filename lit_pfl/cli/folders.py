"""The folder of a run: nobody else's, empty if the run is a new one, and one that can be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl_callbacks import RunLogger, run_folder
from lit_pfl_callbacks.files import lock, opened
from lit_pfl_callbacks.run_folder import RUNS, checked_rows

#: how a configuration begins that a run has written
OF_A_RUN = "# lit-pfl "


def root_of_runs(root: str | os.PathLike[str] | None) -> str:
    """Return the folder of all runs.

    Args:
        root: ``trainer.default_root_dir``.

    Raises:
        ConfigError: when it is on another machine.
    """
    if "://" in str(root):
        raise ConfigError(f"trainer.default_root_dir={root}: run folders are files of this machine; give a path.")
    return str(Path(root).expanduser()) if root else RUNS


def folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, so that the run continues there; None if in none."""
    folder = checkpoint.absolute().parent.parent
    if not (folder / "metrics.csv").exists() and not (folder / "config.yaml").exists():
        return None
    return Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder


@contextmanager
def taken_folder(trainer: L.Trainer, known: bool, begins: bool, option: str) -> Iterator[None]:
    """Take the folder of a Trainer's run, and keep it to this process.

    Args:
        trainer: the Trainer.
        known: whether it is the folder of a checkpoint that was given, so that there is to be a run in it.
        begins: whether a run begins, and does not continue from a checkpoint that lies elsewhere.
        option: what it was chosen by.

    Raises:
        ConfigError: when there is a run in it, when it cannot be written, or when another process has it.
    """
    folder, logger = run_folder(trainer), trainer.loggers[0]
    made = not known and isinstance(logger, RunLogger) and not folder.exists()
    try:
        if made and isinstance(logger, RunLogger):
            try:
                folder = logger.make_folder()
            except FileExistsError:  # another process has done so just now, and is at work in it
                made = False
        _try_writing(folder)
    except OSError as error:
        how = "Make it writable, or copy it" if known else "Choose another with --folder FOLDER"
        raise ConfigError(f"The run folder cannot be written: {error}. {how}.") from None
    with alone_in(folder, made):
        if not known and (begins or isinstance(logger, RunLogger)):
            _refuse_a_run_in(folder, option)
        yield


def _refuse_a_run_in(folder: Path, option: str) -> None:
    """See that there is no run in a folder.

    Raises:
        ConfigError: when there is one that has come to the end of a round, or a file of somebody's own in the place of
            one of a run's.
    """
    config = folder / "config.yaml"
    checkpoints = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: (path.name != "last.ckpt", path))
    if checkpoints:
        how = f"Continue it by --ckpt_path {checkpoints[0]}"
    elif (folder / "metrics.csv").exists() and not _first_round(folder / "metrics.csv"):
        how = "It has no checkpoint to continue from; move it away"
    elif config.exists() and not config.read_text(encoding="utf-8", errors="replace").startswith(OF_A_RUN):
        raise ConfigError(f"{option}: {config} is not of a run, and would be overwritten; choose another folder.")
    else:
        return
    raise ConfigError(f"{option}: there is a run in {folder}. {how}, or choose another folder.")


def _first_round(metrics: Path) -> bool:
    """Say whether there are rows of a first round only: those of a run that was cut off before its checkpoint."""
    try:
        return all(int(float(row["round"])) <= 1 for row in checked_rows(metrics, ["round"]))
    except MisconfigurationException:  # it is damaged, or somebody else's
        return False


def put_aside(folder: Path) -> None:
    """Put aside what is left of a run that was cut off in its first round, once all processes have read it."""
    config, metrics = folder / "config.yaml", folder / "metrics.csv"
    if config.exists():
        config.replace(folder / "config.cut_off.yaml")  # it may be what this command was given, edited by hand
        (folder / "partition.csv").unlink(missing_ok=True)
    if metrics.exists():  # other tables are written anew, whatever is in them
        metrics.replace(folder / "metrics.cut_off.csv")


def _try_writing(folder: Path) -> None:
    """Write into a folder and into that of its checkpoints, as far as they are there: permissions do not say all."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder / "checkpoints"):
        if place.exists():
            with tempfile.TemporaryFile(dir=place):
                pass


def check_root(trainer: L.Trainer) -> None:
    """Without a logger there is no run folder: see that the only checkpoint can be written, over none of another run.

    Raises:
        ConfigError: when it cannot, or would be.
    """
    root = Path(trainer.default_root_dir)
    last = root / "checkpoints" / "last.ckpt"
    if not any(isinstance(callback, LastCheckpoint) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return
    try:
        _try_writing(root)
    except OSError as error:
        raise ConfigError(f"trainer.default_root_dir: it cannot be written: {error}. Choose another.") from None
    if last.exists():
        raise ConfigError(
            f"trainer.default_root_dir: {last} would be overwritten. Continue it by --ckpt_path, or give another "
            "folder, or --trainer.enable_checkpointing false."
        )


@contextmanager
def alone_in(folder: Path, made: bool) -> Iterator[None]:
    """Keep a run folder to this process; the lock goes with it, however it ends.

    Args:
        folder: the folder.
        made: whether it was made for this run; then it is removed if it ends empty.

    Raises:
        ConfigError: when another process has it.
    """
    handle = opened(folder)
    try:
        if not lock(handle):
            raise ConfigError(f"Another process is at work in {folder}; wait for it, or choose another folder.")
        yield
    finally:
        os.close(handle)
        if made:
            with suppress(OSError):
                folder.rmdir()
