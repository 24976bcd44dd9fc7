"""A script: ``lit-pfl`` as on Windows, as far as that can be had on Linux: what it lacks, and its rules for files.

It runs the commands that it is given, each a JSON list of words.
"""

import builtins
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.trainer.connectors import signal_connector

import lit_pfl.cli.run  # noqa: F401 - libraries come first: they know Windows

MISSING = {
    os: ("getloadavg", "fork", "killpg", "getuid", "geteuid", "getgid", "setsid", "mkfifo", "sched_getaffinity"),
    signal: ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "alarm", "setitimer", "pthread_sigmask"),
}
SIGNALS = {signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM}
for module, names in MISSING.items():
    for name in names:
        vars(module).pop(name, None)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # type: ignore[assignment]
signal_connector._IS_WINDOWS = True
signal.valid_signals = SIGNALS.copy
for name in [name for name in sys.modules if name.startswith(("lit_pfl", "lit_pfl_callbacks"))]:
    del sys.modules[name]  # to be imported on what seems to be Windows

opening, low_opening = io.open, os.open


def as_on_windows(file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
    """Text in a code page of old unless an encoding is named; and a folder is no file."""
    if "b" not in mode and encoding in (None, "locale"):
        encoding = "cp1252"
    return opening(file, mode, buffering, encoding, *args, **kwargs)


def low_as_on_windows(path, flags, *args, **kwargs):
    if not isinstance(path, int) and Path(path).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return low_opening(path, flags, *args, **kwargs)


def unless_open(function, which):
    """Let no file be renamed, replaced or removed that this process has open."""

    def called(*paths, **kwargs):
        if kwargs.get("dir_fd") is None:
            there = {Path(path).resolve() for path in paths[:which] if Path(path).exists()}
            for entry in Path("/proc/self/fd").iterdir():
                with suppress(FileNotFoundError):
                    if entry.readlink() in there:
                        raise PermissionError(13, "[WinError 32] it is open", str(entry.readlink()))
        return function(*paths, **kwargs)

    return called


builtins.open = io.open = as_on_windows
os.open, shutil._use_fd_functions = low_as_on_windows, False
tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # which is removed once it is closed
os.replace, os.rename = unless_open(os.replace, 2), unless_open(os.rename, 2)
os.remove, os.unlink = unless_open(os.remove, 1), unless_open(os.unlink, 1)

if __name__ == "__main__":
    from lit_pfl.cli import main

    for command in sys.argv[1:]:
        main(json.loads(command))
