"""States of single clients in files next to the checkpoints that refer to them, as they are written and deleted.

A file's name says whose state it is, which run wrote it and what is in it, so it is never changed: a process that is
killed anywhere leaves every checkpoint with just the states that it was written with. A file is deleted once no
checkpoint refers to it.
"""

import os
import secrets
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from lit_pfl.errors import ConfigError, SaveError
from lit_pfl.lightning_internals.state_files import (
    ASLEEP,
    ENDING,
    FOLDER,
    Content,
    StateFile,
    digest,
    references_to,
    referred_to,
)
from lit_pfl_callbacks.files import link_or_copy, lock, opened, replacing

#: how many clients' files are in one folder
EACH = 1000


class StateFiles:
    """The latest states of clients that are not in memory.

    Args:
        folder: where they go: the folder next to the checkpoints. None for a temporary one.
        near: where a temporary folder is made; by default where the system has those.

    Raises:
        ConfigError: when it cannot be written into.
    """

    def __init__(self, folder: Path | None, near: Path | None = None) -> None:
        self._temporary = folder is None
        try:
            if folder is None:
                if near is not None:
                    near.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix="clients-", dir=near))
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            where = folder or near or tempfile.gettempdir()
            raise ConfigError(
                f"federation.engine.awake: states of clients cannot be written into {where} "
                f"({error.strerror or error}); choose another folder for the run, or leave out "
                "federation.engine.awake."
            ) from None
        self.folder = folder.resolve()
        self._handle = opened(self.folder)
        weakref.finalize(self, os.close, self._handle)
        # what is there although no other run is at work is of processes that have ended: see _sweep
        self._found = set(self.folder.glob("*/*")) if lock(self._handle) else set()
        lock(self._handle, shared=True)
        self._run = secrets.token_hex(4)  # another run of the same seed beside it has files with the same content
        self.latest: dict[int, StateFile] = {}
        self._elsewhere: set[int] = set()  # clients whose files are beside a checkpoint in another folder
        self._written: set[Path] = set()  # not known to be on the disk itself
        self._count = 0  # of checkpoints
        self._since: dict[int, int] = {}  # by client, how many checkpoints there were before its file
        self._former: list[Former] = []
        self._checkpoints: dict[tuple[int, int], int | frozenset[str] | None] = {}  # see _refers
        self._linked: dict[Path, set[str]] = {}  # by another folder of checkpoints, the files put there
        self._others: dict[Path, dict[tuple[int, int], frozenset[str] | None]] = {}  # the checkpoints there

    def read(self, client: int) -> Content | None:
        """Return a client's latest state; None for one that is as it was made.

        Raises:
            ConfigError: when its file is not there, or is not what was written.
        """
        file = self.latest.get(client)
        return None if file is None else file.read()

    def put(self, client: int, state: Content, trained: bool) -> None:
        """Write a client's state.

        Raises:
            SaveError: when it cannot be written.
        """
        content = state.content
        file = StateFile(self.folder, f"{client // EACH}/{client}-{self._run}-{digest(content)}{ENDING}", trained)
        since = self._count
        try:
            if _is_there(file.path, len(content)):  # it was the latest before, and a checkpoint may refer to it
                since = -1
            else:
                with replacing(file.path, sync=False) as out:  # references() waits for all of them together
                    out.write(content)
        except OSError as error:
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise SaveError(
                f"The state of client {client} cannot be written: {file.path} ({reason.strerror or reason}); the last "
                "checkpoint is whole."
            ) from error
        self._written.add(file.path)
        self._leave(client, file)
        self.latest[client], self._since[client] = file, since
        self._elsewhere.discard(client)

    def _leave(self, client: int, new: StateFile | None = None) -> None:
        """Have another file of a client than the latest one, or none."""
        former = self.latest.pop(client, None)
        if former is None or former.folder != self.folder or (new is not None and new.path == former.path):
            return
        if self._since[client] == self._count:  # no checkpoint refers to it
            former.path.unlink(missing_ok=True)
            self._written.discard(former.path)
        else:
            self._former.append(Former(client, former, self._since[client], self._count))

    def take_over(self, files: Mapping[int, StateFile]) -> None:
        """Take the states of a checkpoint for the latest ones."""
        self.forget()
        self.latest, self._since = dict(files), dict.fromkeys(files, -1)
        self._elsewhere = {client for client, file in files.items() if file.folder != self.folder}

    def forget(self) -> None:
        """Have no state of any client; files stay as long as a checkpoint refers to them."""
        for client in list(self.latest):
            self._leave(client)
        self._elsewhere = set()

    def references(self) -> str:
        """Return what a checkpoint holds of the latest states, which are on the disk from now on."""
        with ThreadPoolExecutor(8) as pool:  # a disk takes as long for some as for one
            list(pool.map(_on_the_disk, self._written))
        self._written, self._count = set(), self._count + 1
        return references_to(self.latest)

    # ------------------------------------------------------------------------------------------- beside checkpoints

    def join(self, checkpoint: Path) -> None:
        """See that all latest states lie next to a checkpoint that is about to be written.

        Raises:
            OSError: when they cannot.
        """
        folder = checkpoint.resolve().parent / FOLDER
        for client in list(self._elsewhere) if folder == self.folder else self.latest:
            file = self.latest[client]
            is_new = _link(file.path, folder / file.name)
            if folder == self.folder:
                self.latest[client] = file._replace(folder=folder)
            elif is_new:
                self._linked.setdefault(folder, set()).add(file.name)
        if folder == self.folder:
            self._elsewhere = set()

    def clean(self, checkpoint: Path) -> None:
        """Delete what no checkpoint refers to any more, now that one is in its place, or is removed."""
        if (folder := checkpoint.resolve().parent / FOLDER) != self.folder:
            self._clean_elsewhere(folder)
            if self._temporary:  # with no checkpoint beside it
                self._delete(self._former)
                self._former = []
            return
        there = _files_in(self.folder.parent)
        known = self._checkpoints | ({_key(checkpoint): self._count} if checkpoint.exists() else {})
        self._checkpoints = {key: known[key] if key in known else _names_in(path) for key, path in there.items()}
        needed = [former for former in self._former if self._refers(former)]
        paths = {former.file.path for former in needed}
        self._delete(former for former in self._former if former.file.path not in paths)
        self._former = needed
        if self._found and None not in self._checkpoints.values():
            self._sweep()

    def _delete(self, formers: Iterable["Former"]) -> None:
        for former in formers:
            latest = self.latest.get(former.client)
            if latest is None or latest.path != former.file.path:
                former.file.path.unlink(missing_ok=True)

    def _clean_elsewhere(self, folder: Path) -> None:
        """Do the same in another folder of checkpoints, with the files that this run has put there."""
        known = self._others.get(folder, {})
        names = {key: known[key] if key in known else _names_in(path) for key, path in _files_in(folder.parent).items()}
        self._others[folder] = names
        there = [one for one in names.values() if one is not None]
        if len(there) < len(names):
            return
        linked = self._linked.get(folder, set())
        for name in linked.difference(*there):
            (folder / name).unlink(missing_ok=True)
        linked.intersection_update(frozenset[str]().union(*there))

    def _refers(self, former: "Former") -> bool:
        """Say whether a checkpoint that is there refers to a file.

        Of those that were written here the number is known, of others the names of the files that they refer to; None
        of one that cannot be read.
        """
        return any(
            former.since < one <= former.until if isinstance(one, int) else one is None or former.file.name in one
            for one in self._checkpoints.values()
        )

    def _sweep(self) -> None:
        """Delete what processes that have been killed have left."""
        names = {file.name for file in self.latest.values()} | {former.file.name for former in self._former}
        names = names.union(*(one for one in self._checkpoints.values() if isinstance(one, frozenset)))
        for path in self._found:
            if f"{path.parent.name}/{path.name}" not in names:
                path.unlink(missing_ok=True)
        self._found = set()


class Former(NamedTuple):
    """A file that is not a client's latest any more.

    Args:
        client: whose it is.
        file: the file.
        since: checkpoints of higher numbers refer to it,
        until: up to this one.
    """

    client: int
    file: StateFile
    since: int
    until: int


def _files_in(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # another run's unfinished file is renamed at any time
            if path.is_file():
                found[_key(path)] = path
    return found


def _names_in(checkpoint: Path) -> frozenset[str] | None:
    """Return the names of the files that somebody else's checkpoint refers to; None where that cannot be read."""
    try:
        if not zipfile.is_zipfile(checkpoint) and checkpoint.suffix != ".ckpt":
            return frozenset()
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        federation = content.get("federation", {}) if isinstance(content, dict) else {}
        return frozenset(file.name for file in referred_to(federation.get(ASLEEP, ""), checkpoint).values())
    except Exception:  # whatever the pickle machine stumbles over
        return None


def _on_the_disk(path: Path) -> None:
    with suppress(FileNotFoundError), path.open("rb") as file:  # another one may have taken its place
        os.fsync(file.fileno())


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _link(path: Path, new: Path) -> bool:
    """Let a file be in another place too; say whether it was not there before."""
    if _is_there(new, path.stat().st_size):
        return False
    new.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(path, new)
    return True


def _key(path: Path) -> tuple[int, int]:
    """Return what tells a checkpoint from the one that takes its place, wherever it is moved."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
