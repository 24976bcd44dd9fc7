"""Ray on this machine, or a cluster that is there already: how it is begun, and that nothing of it is left."""

import atexit
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import signals_kept, undisturbed

#: seconds that may pass until what is left of Ray is gone
CLEANING = 30.0
#: Ray's options for a run on one machine: it is not reached from outside, and does not tell its makers that it is used
AT_HOME = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # nobody else waits for this machine more than the run does
}


def connect(address: str | None, cores: float) -> Any:
    """Return the module ``ray``, connected.

    Args:
        address: a cluster's; None for Ray as it is connected already, or else for one on this machine, with this many
            cores, which ends with this process, however that ends.
        cores: number of cores, for one on this machine.

    Raises:
        ConfigError: when Ray is not installed, or a cluster cannot be reached.
    """
    if address is None and "ray" not in sys.modules:  # which reads this when it is imported, and later
        for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
            os.environ.setdefault(name, value)
    with _environment({} if address else AT_HOME):
        return _connect(address, cores)


def _connect(address: str | None, cores: float) -> Any:
    try:
        import ray
        from ray._private import ray_constants
    except ImportError as error:
        raise ConfigError('federation.engine=Ray needs Ray: pip install "lit-pfl[ray]".') from error
    if ray.is_initialized():
        return ray
    if address is None:
        # what RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 sets, on any system: nothing but 127.0.0.1 is listened at
        ray_constants.ENABLE_RAY_CLUSTER = False
    options: dict[str, Any] = {"logging_level": logging.ERROR, "configure_logging": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    with signals_kept(), undisturbed():  # Ray sets handlers
        if address is not None:
            try:
                ray.init(address=address, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"federation.engine.address={address}: {' '.join(str(error).split())}") from error
            return ray
        # names of sockets must be short, and TMPDIR may not be
        folder = Path(tempfile.mkdtemp(prefix="lit-pfl-ray-", dir="/tmp" if Path("/tmp").is_dir() else None))
        _clean_up_after_this_process(folder)
        options |= {"num_cpus": max(1, round(cores)), "include_dashboard": False, "_temp_dir": str(folder)}
        ray.init(address="local", **options)  # also where RAY_ADDRESS names another
    return ray


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, for as long as Ray is begun: other processes of this one are not to have them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _clean_up_after_this_process(folder: Path) -> None:
    """Let a process wait for the end of this one, and end and delete what Ray leaves in a folder."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("cleaner.py")), str(folder)]
    cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is not for it
    owner = os.getpid()

    def end() -> None:
        if os.getpid() != owner:
            return
        import ray

        ray.shutdown()
        assert cleaner.stdin is not None
        cleaner.stdin.close()
        cleaner.wait(CLEANING)

    atexit.register(end)
