"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
