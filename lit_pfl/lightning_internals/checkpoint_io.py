"""Where checkpoints go: the federation's to a file, its clients' into the federation's."""

import re
import zipfile
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.errors import ConfigError, SaveError, first_line
from lit_pfl.lightning_internals.state_files import more_than_tensors, with_states
from lit_pfl.lightning_internals.state_writing import StateFiles
from lit_pfl_callbacks.files import link_or_copy, replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its place and renames it, so that a killed process leaves the former one whole.

    Args:
        if_not_saved: what to do when a checkpoint cannot be written, as on a full disk: ``stop``, or ``continue`` with
            a warning. Either way the former checkpoint stays as it is.

    Attributes:
        states: states of clients that checkpoints refer to, which are to lie next to them; None for none.
    """

    states: StateFiles | None = None

    def __init__(self, if_not_saved: Literal["stop", "continue"] = "stop") -> None:
        self.if_not_saved = if_not_saved

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save.

        Raises:
            SaveError: when the file cannot be written.
        """
        if "://" in str(path):
            if self.states is not None:
                raise ConfigError(f"federation.engine.awake: checkpoints are files of this machine, and {path} is not.")
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            if self.states is not None:
                self.states.join(Path(path))
            with replacing(Path(path)) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # PyTorch's own, when its writer is cut short
            reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
            message = f"The checkpoint {path} cannot be written ({first_line(reason)}); the former one is whole."
            if self.if_not_saved == "stop":
                raise SaveError(message) from error
            rank_zero_warn(f"{message} The run continues without.")
            return
        if self.states is not None:
            self.states.clean(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, and the files that no other one refers to."""
        super().remove_checkpoint(path)
        if self.states is not None and "://" not in str(path):
            self.states.clean(Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load.

        Raises:
            ConfigError: when the file is not a whole checkpoint.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        return read_checkpoint(Path(path), weights_only)


#: what Lightning's ``ckpt_path`` may be besides a file, where a federation has no such checkpoint
WORDS = ("best", "hpc", "registry")


def read_checkpoint(path: Path, weights_only: bool | None = True, mmap: bool = False) -> dict[str, Any]:
    """Read a federation's checkpoint, on the CPU.

    Args:
        path: the file.
        weights_only: see ``torch.load``.
        mmap: read tensors only once they are looked at.

    Raises:
        ConfigError: when there is no such file, when it is damaged, or when it is not a federation's.
    """
    if not path.is_file():
        what = "is a folder; give a file, such as a run's checkpoints/last.ckpt" if path.is_dir() else "is not there"
        hint = "; of a federation name the file, in RUN/checkpoints" if str(path) in WORDS else ""
        raise ConfigError(f"Checkpoint file not found: {path} {what}{hint}.")
    checkpoint = read_whole(path, weights_only, mmap)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("federation"), dict):
        raise ConfigError(f"{path} is not a federation's checkpoint.")
    if "loops" not in checkpoint:  # without them a Trainer would begin to count anew
        raise ConfigError(f"{path} is not a whole checkpoint: it lacks the rounds done so far.")
    with_states(checkpoint["federation"], path, weights_only)
    return checkpoint


def read_whole(path: Path, weights_only: bool | None = True, mmap: bool = False) -> Any:
    """Read what ``torch.save`` wrote, on the CPU; see :func:`read_checkpoint`.

    Raises:
        ConfigError: when the file is damaged.
    """
    try:
        if damaged := _damaged(path):
            raise ConfigError(f"{path} is damaged: the checksum of {damaged} does not fit.{_offer(path)}")
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except ConfigError:
        raise
    except Exception as error:  # whatever the pickle machine stumbles over
        if untrusted := more_than_tensors(error):
            raise ConfigError(f"{path} {untrusted}") from error
        raise ConfigError(f"{path} is not a whole checkpoint: {first_line(error)}.{_offer(path)}") from error


def _damaged(path: Path) -> str | None:
    """Return what of a checkpoint is damaged. PyTorch does not look at checksums: it would load a flipped bit."""
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def _is_whole(path: Path) -> bool:
    try:
        return _damaged(path) is None
    except Exception:  # whatever a damaged archive makes of it
        return False


def _offer(path: Path) -> str:
    """Name the checkpoint of the round before, if it is there and whole."""
    before = _before(path)
    return f" The one before it is whole: {before}." if before is not None and _is_whole(before) else ""


def _before(path: Path) -> Path | None:
    """Return where :class:`LastCheckpoint` keeps the checkpoint before this one; None for another's."""
    found = re.fullmatch(r"last(?:-(\d{1,4}))?\.ckpt", path.name)
    return path.with_name(f"last-{int(found[1] or 0) + 1}.ckpt") if found else None


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``checkpoints/last.ckpt`` in the run folder, of the latest round, and some before it if asked to.

    Args:
        dirpath: another folder than the run folder's ``checkpoints``.
        keep: how many checkpoints to keep: above 1, ``last-1.ckpt`` is the one before ``last.ckpt``, and so on.

    Raises:
        ConfigError: when ``keep`` is less than 1.
    """

    def __init__(self, dirpath: str | Path | None = None, keep: int = 1) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigError(f"LastCheckpoint: keep={keep!r}; give a whole number of 1 or more.")
        # Not save_last=True, which saves only when one of the best is saved too.
        super().__init__(dirpath, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
        self.keep = keep
        self._own = False  # whether the latest one is of this process

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember nothing: there is one file, whatever the path by which the run is reached now."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        last = Path(filepath)
        # What others have left may be damaged, and must not push out what this run has gone on from.
        if self.keep > 1 and trainer.is_global_zero and last.is_file() and (self._own or _is_whole(last)):
            try:
                _set_back(last, self.keep - 1)
            except OSError as error:  # the newer one is the one that counts
                rank_zero_warn(f"{last} cannot be kept as an older checkpoint ({first_line(error)}).")
        super()._save_checkpoint(trainer, filepath)
        self._own = True


def _set_back(path: Path, steps: int) -> None:
    """Let a checkpoint be the one before, too, and those before it one older, of which this many are kept.

    The checkpoint itself stays in its place, so that a process that is killed here leaves it there.
    """
    before = _before(path)
    assert before is not None
    if before.exists():
        if before.samefile(path):  # a former attempt went no further
            return
        if steps > 1:
            _set_back(before, steps - 1)
    link_or_copy(path, before)


class MemoryCheckpointIO(AtomicCheckpointIO):
    """Keeps a checkpoint of a client's Trainer in memory, under the path ``memory``; others go to files."""

    MEMORY = "memory"

    checkpoint: dict[str, Any]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save. What is kept in memory is kept by reference, without a copy."""
        if path == self.MEMORY:
            self.checkpoint = checkpoint
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what is kept in memory."""
        return self.checkpoint
