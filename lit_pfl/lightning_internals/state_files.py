"""States of single clients in files next to the checkpoints that refer to them, as they are read."""

import hashlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_pfl.errors import ConfigError

#: the folder beside checkpoints, and under which name they refer to what is in it
FOLDER, ASLEEP = "clients", "asleep"
ENDING = ".state"
#: what is in a file: a client's state, its random stream, and names of what the state leaves out
PARTS = ("clients", "streams", "constant")


class Content(NamedTuple):
    """What is in a client's file.

    Args:
        content: the bytes.
        weights_only: whether to load nothing but tensors and plain values: of a checkpoint that is not trusted.
    """

    content: bytes
    weights_only: bool | None = False

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Content":
        """Return what goes into the file of a state."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        return cls(buffer.getvalue())

    def state(self) -> dict[str, Any]:
        """Return the state, on the CPU.

        Raises:
            ConfigError: when there is more than tensors and plain values in it, and that is not to be loaded.
        """
        try:
            return torch.load(io.BytesIO(self.content), map_location="cpu", weights_only=self.weights_only)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"The state of a client {more_than_tensors(error) or error}") from error


def more_than_tensors(error: Exception) -> str | None:
    """Return what is wrong with a checkpoint that PyTorch does not load since it need not be trusted, if that is it."""
    if (found := re.search(r"GLOBAL (\S+)", str(error))) is None:
        return None
    return (
        f"holds a {found[1]}, and only tensors and plain values are loaded: let get_extra_state(), "
        "on_save_checkpoint() or state_dict() of the learner or of a callback return such; or give weights_only=False "
        "next to ckpt_path, if you trust the file."
    )


class StateFile(NamedTuple):
    """Where a client's state is.

    Args:
        folder: the folder next to a checkpoint.
        name: the file's name in it, as a checkpoint has it.
        trained: whether the client has ever trained.
        weights_only: whether to load nothing but tensors and plain values: of a checkpoint that is not trusted.
    """

    folder: Path
    name: str
    trained: bool
    weights_only: bool | None = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.name

    def read(self) -> Content:
        """Return what is in it.

        Raises:
            ConfigError: when it is not there, or is not what was written.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{_not_there(self.path)} ({error.strerror or error}).") from None
        if digest(content) != self.path.stem.rpartition("-")[2]:
            raise ConfigError(f"{self.path} is damaged: it is not what its checkpoint refers to.")
        return Content(content, self.weights_only)


class SavedStates(Mapping[int, Any]):
    """A part of clients' states, read when it is asked for: of those clients that a checkpoint refers to.

    Args:
        files: by client id.
        part: which part: ``clients``, ``streams``, or ``constant``, names of what is left out of the first.
    """

    def __init__(self, files: Mapping[int, StateFile], part: str) -> None:
        self.files, self.part = files, part
        self._has = [client for client, file in files.items() if part != "streams" or file.trained]

    def __getitem__(self, client: int) -> Any:
        return self.files[client].read().state()[self.part]

    def __contains__(self, client: object) -> bool:
        return client in self.files and (self.part != "streams" or self.files[client].trained)  # type: ignore[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._has)

    def __len__(self) -> int:
        return len(self._has)


def with_states(federation: dict[str, Any], checkpoint: Path, weights_only: bool | None) -> None:
    """Put the states of clients into what a checkpoint has of a federation, where it refers to files next to it.

    Clients that have no file are as they were made.

    Raises:
        ConfigError: when one of these is not there.
    """
    if ASLEEP not in federation:
        return
    files = referred_to(federation[ASLEEP], checkpoint, weights_only)
    if lost := next((file.path for file in files.values() if not file.path.is_file()), None):
        raise ConfigError(f"{_not_there(lost)}.")
    federation |= {ASLEEP: True, **{part: SavedStates(files, part) for part in PARTS}}


def references_to(files: Mapping[int, StateFile]) -> str:
    """Return what a checkpoint holds of files: their names, a line each; those of who has never trained end in ``?``.

    They are in the order of the clients' ids. They are text, since Python takes longer to save a table of many clients
    than all the rest.
    """
    return "\n".join(file.name if file.trained else f"{file.name}?" for _, file in sorted(files.items()))


def referred_to(names: str, checkpoint: Path, weights_only: bool | None = True) -> dict[int, StateFile]:
    """Return by client id the files that a checkpoint refers to, from what :func:`references_to` has returned."""
    folder = checkpoint.resolve().parent / FOLDER
    files = (StateFile(folder, line.rstrip("?"), not line.endswith("?"), weights_only) for line in names.splitlines())
    return {int(file.name.rpartition("/")[2].partition("-")[0]): file for file in files}


def _not_there(path: Path) -> str:
    return f"{path} is not there: with federation.engine.awake, a checkpoint needs the folder {FOLDER} next to it"


def digest(content: bytes) -> str:
    """Return what a file's name says of what is in it."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
