"""A campaign against worker processes: they are killed at random moments, and every run comes to the same bits.

``pytest -m slow -n 0 -s tests/engines/test_ray_campaign.py --killed 50`` plays 50 seeds, each against three workers.
"""

import importlib.util
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import lightning as L
import pytest
from ray_runs import fit_saved, same, same_files, workers_kept

from lit_pfl import methods as M
from lit_pfl.engines import Local, Ray, workforce
from lit_pfl.testing import MethodTester

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)
pytestmark = pytest.mark.slow
METHODS = ("FedAvg", "Ditto", "Scaffold", "SimFed", "FactorizedFL", "FedRep", "FedDyn", "PsiNet")
ROUNDS, WORKERS = 5, 3


def pytest_generate_tests(metafunc):
    metafunc.parametrize("seed", range(metafunc.config.getoption("--killed")))


@pytest.fixture(scope="module")
def folder():
    """The folder of Ray, which has as many cores as there are workers."""
    from lit_pfl.engines.cluster import connect

    ray = connect(None, WORKERS)
    with workers_kept(ray):
        yield ray._private.worker._global_node.get_temp_dir_path()
    ray.shutdown()


def workers_of(folder: str) -> list[int]:
    """Return the ids of Ray's worker processes: at work, or being started."""
    names, parents = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            names[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    raylets = {process for process, name in names.items() if "raylet/raylet" in name and folder in name}
    own = (process for process in names if parents.get(process) in raylets)
    return sorted(process for process in own if names[process].startswith(("ray::Worker", "ray::IDLE")))


def pid(module):
    return os.getpid()


class Clock(L.Callback):
    """Takes the time of a fit."""

    def on_train_start(self, trainer, pl_module):
        self.began = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        self.seconds = time.perf_counter() - self.began


class KillAtRandom(L.Callback):
    """Kills a worker at any moment of a fit, and sometimes another process of Ray's, which may only be starting.

    Args:
        folder: of Ray.
        seed: of the draws.
        seconds: how long the fit takes.
    """

    def __init__(self, folder: str, seed: int, seconds: float) -> None:
        draw = random.Random(seed)
        self.waits = [draw.uniform(0, seconds) for _ in range(1 + (draw.random() < 0.3))]
        self.draw, self.folder, self.killed = draw, folder, 0
        self.over = threading.Event()

    def on_train_start(self, trainer, pl_module):
        self.thread = threading.Thread(target=self._kill, args=[sorted(set(pl_module.ask(pid).values()))])
        self.thread.start()

    def _kill(self, at_work):
        for seconds in self.waits:
            if self.over.wait(seconds):
                return
            if there := workers_of(self.folder) if self.killed else at_work:
                os.kill(self.draw.choice(there), signal.SIGKILL)
                self.killed += 1

    def on_train_end(self, trainer, pl_module):
        self.over.set()
        self.thread.join()

    def on_exception(self, trainer, pl_module, exception):
        self.on_train_end(trainer, pl_module)


def test_runs_whose_workers_are_killed_end_with_the_same_bits(folder, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(workforce, "GATHERING", 0)  # those who take the place of the last run's dead join this one
    method, clock = MethodTester(getattr(M, METHODS[seed % len(METHODS)])).method(), Clock()
    one = fit_saved(method, Local(), tmp_path / "one", ROUNDS, callbacks=[clock], seed=seed)
    kill = KillAtRandom(folder, seed, clock.seconds)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        two = fit_saved(method, Ray(WORKERS), tmp_path / "two", ROUNDS, callbacks=[kill], seed=seed)
        same(one, two)
    same_files(tmp_path / "one", tmp_path / "two")
    two.engine.abort()
    lost = sum("is lost" in str(warning.message) for warning in said)
    print(f"\n{seed} {type(method).__name__}: {kill.killed} killed, {lost} seen to be lost")
