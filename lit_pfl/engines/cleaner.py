"""Waits for the end of the process that has started it; then ends what still works in a folder, and deletes that.

It is started as a script on its own, without any package, so that it takes little memory.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

#: seconds for which processes may end by themselves, and after which nobody waits for them any more
PATIENCE, AT_MOST = 3.0, 20.0


def processes_in(folder: str, but: set[int]) -> list[int]:
    """Return the ids of this user's processes that have a file of a folder open, or name it in their command."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            there = folder.encode() in (entry / "cmdline").read_bytes()
            if there or any(str(one.readlink()).startswith(folder) for one in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return [process for process in found if process not in but]


def clean(folder: str, but: set[int]) -> None:
    """End what works in a folder, except some processes, and delete it."""
    began = time.monotonic()
    while (left := processes_in(folder, but)) and time.monotonic() < began + AT_MOST:
        if time.monotonic() > began + PATIENCE:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except OSError:
                    continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    owner = os.getppid()
    sys.stdin.read()  # which ends with the owner, or when it is about to end and waits
    clean(sys.argv[1], {owner, os.getpid()})
