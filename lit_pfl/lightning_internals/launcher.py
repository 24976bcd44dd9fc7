"""Starting the processes of a run, as Lightning does, and seeing how they do."""

import signal
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lit_pfl.errors import RankError

#: seconds in which a process that is asked to end may do so
AFTER_SIGTERM = 5.0


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the current script again for every further process of this machine.

    Lightning's own kills all processes where one has ended badly, and nobody gets to say why. This one is asked.
    """

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes, unless somebody else did, and call a function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def check(self) -> None:
        """See that all processes are at work, or have ended well.

        Raises:
            RankError: when one has not.
        """
        for rank, process in enumerate(self.procs, start=1):
            if code := process.poll():
                how = f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"
                raise RankError(f"Process {process.pid}, number {rank} on its machine, {how}; its own output says why.")

    def end(self, seconds: float) -> None:
        """End those processes that have not ended by themselves in some seconds."""
        self._wait(seconds)
        for signum in (signal.SIGTERM, signal.SIGKILL):  # the second for those that hang
            self.kill(signum)
            self._wait(AFTER_SIGTERM)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.procs):
            time.sleep(0.05)
