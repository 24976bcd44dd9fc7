"""Fixtures for all tests."""

import functools
import gzip
import importlib.metadata
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Every Trainer asks what the installed packages register, and would look through all of them anew.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE  # noqa: E402, F401 - imports Lightning before its warnings are set

warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
STARTED = time.monotonic()
SOME = 8  # slow cases of a test that are not left to `pytest -m full`, at least
torch.set_num_threads(1)  # the tests' networks are tiny, and more threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in processes that tests start, beside other tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; some tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the sizes of the campaigns, where one begins, and how long all may take."""
    parser.addoption("--campaign", type=int, default=10, help="seeded runs of tests/test_campaign.py (with -m slow)")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first of these runs")
    parser.addoption("--minutes", type=float, default=float("inf"), help="skip tests that would begin after so many")
    parser.addoption(
        "--killed", type=int, default=3, help="seeded runs of tests/engines/test_ray_campaign.py (with -m slow)"
    )


def _is_default(item: pytest.Item) -> bool:
    return not any(map(item.get_closest_marker, ("slow", "full", "gpu")))


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


def _spread(those: list[pytest.Item], count: int, mark: str, first: int) -> None:
    """Mark all but so many of a test's parameters, evenly spread from a first one, instead of as slow."""
    kept = {(first + i * len(those) // count) % len(those) for i in range(min(count, len(those)))}
    for i, item in enumerate(those):
        if i not in kept:
            item.own_markers = [own for own in item.own_markers if own.name != "slow"]
            item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave a few of a test's parameters among the default tests, and some among the slow ones; begin with the longest.

    Of a test that is marked ``few(n)``, all but n are slow. Of slow ones of one test, a quarter stays so, or ``SOME``,
    and all where it is marked ``every``; the others are full. What would then run by default of one that is marked
    ``seconds`` is slow.
    """
    for those in _by_test(filter(_is_default, items)):
        if (few := those[0].get_closest_marker("few")) is not None:
            _spread(those, few.args[0], "slow", 0)
    for those in _by_test(item for item in items if item.get_closest_marker("slow")):
        if not those[0].get_closest_marker("every"):
            first = zlib.crc32(those[0].name.partition("[")[0].encode())
            _spread(those, max(SOME, len(those) // 4), "full", first)
    for item in items:
        if item.get_closest_marker("seconds") and _is_default(item):
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what would begin too late."""
    if time.monotonic() - STARTED > 60 * (limit := item.config.getoption("minutes")):
        pytest.skip(f"{limit:g} minutes are over (--minutes)")


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What Lightning tells its users on the way, as ``caplog``."""
    # it keeps that to itself where it was imported before anything handled messages, as by pytest before 9
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        yield caplog


@pytest.fixture(autouse=True)
def _no_leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run every test in a folder of its own; see that it leaves signals, threads and PyTorch's switches alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # lit-pfl puts the current folder there
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # whatever other tests keep busy
    signals = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    others = set(threading.enumerate())
    switches = torch.is_grad_enabled(), torch.get_num_threads(), torch.is_autocast_cache_enabled()
    seed = os.environ.get("PL_GLOBAL_SEED")
    yield
    assert {s: signal.getsignal(s) for s in signals} == signals
    assert (torch.is_grad_enabled(), torch.get_num_threads(), torch.is_autocast_cache_enabled()) == switches
    left = [t for t in threading.enumerate() if t not in others and not t.daemon]
    assert not left, f"threads left running: {left}"
    os.environ.pop("PL_GLOBAL_SEED", None)
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = seed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with CIFAR-10, CIFAR-100 and MNIST as torchvision lays them out: ``LIT_PFL_DATA``. Skips without it."""
    folder = os.environ.get("LIT_PFL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set LIT_PFL_DATA to a folder with cifar-10-batches-py, cifar-100-python and MNIST")
    return Path(folder)


@pytest.fixture(scope="session")
def fashion_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Fashion-MNIST as torchvision lays it out, from the Debian package dataset-fashion-mnist."""
    source = Path("/usr/share/datasets/fashion-mnist")
    if not source.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    folder = tmp_path_factory.mktemp("fashion")
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in source.glob("*.gz"):
        with gzip.open(packed) as read, (raw / packed.stem).open("wb") as write:
            shutil.copyfileobj(read, write)
    return folder
