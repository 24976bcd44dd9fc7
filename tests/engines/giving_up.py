"""A process that gives up waiting for another one, which dies while Python is about to end.

    python giving_up.py PORT

The thread that waits inside gloo comes out of it just then, and must not abort what is left of the process.
"""

import subprocess
import sys
import time

from lit_pfl.engines.processes import Processes
from lit_pfl.errors import RankError


class Slow:
    """What takes its time when Python ends."""

    def __del__(self) -> None:
        time.sleep(1)


def check() -> None:
    if time.monotonic() > began + 0.5:
        raise RankError("gone")


if __name__ == "__main__":
    port = int(sys.argv[1])
    if len(sys.argv) > 2:
        Processes(1, 2, "127.0.0.1", port, timeout=60)
        time.sleep(60)
    other = subprocess.Popen([sys.executable, __file__, str(port), "silent"])
    group, kept = Processes(0, 2, "127.0.0.1", port, timeout=60), Slow()
    began, group.check = time.monotonic(), check
    try:
        group.receive(1)
    except RankError:
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {other.pid}"])
        sys.exit(2)
