"""Files that are there whole or not at all, and locks of files and folders."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write next to a path, and rename it to the path once it is written.

    A killed process, or an error, leaves a former file whole. Missing folders are made.

    Args:
        path: the file.
        sync: whether to wait until it is on the disk, should the machine fail.

    Raises:
        OSError: when the file cannot be written; it names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:  # which says what, but seldom where
        raise OSError(error.errno, f"cannot be written ({error.strerror or error})", str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file, see :func:`replacing`; text in UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def link_or_copy(path: Path, new: Path) -> None:
    """Let a file be in another place too, as a link where the file system has these.

    Args:
        path: the file.
        new: the other place, in a folder that there is; a file there is replaced.

    Raises:
        OSError: when it cannot be.
    """
    unfinished = new.with_name(new.name + ".part")
    unfinished.unlink(missing_ok=True)
    try:
        try:
            unfinished.hardlink_to(path)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, unfinished)
        unfinished.replace(new)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def opened(folder: Path) -> int:
    """Open a folder to :func:`lock` it; return a descriptor. Windows opens no folders; there it is of nothing."""
    return os.open(os.devnull if fcntl is None else folder, os.O_RDONLY)


def lock(file: int | BinaryIO, shared: bool = False) -> bool:
    """Lock a file or folder for as long as it is open and its process lives, in place of a former lock.

    Args:
        file: the open file, or a descriptor.
        shared: whether others may have such a lock too; then it waits for a lock that is not shared.

    Returns:
        Whether it is locked now, and nobody else has it. A file system without locks says that always, and Windows.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
