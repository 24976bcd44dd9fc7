"""Many runs: each a ``lit-pfl fit`` in a process and a folder of its own, several at once, and none done twice."""

import fcntl  # POSIX only, as the signals are
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from lit_pfl.cli.config_files import with_fragments
from lit_pfl_callbacks.files import write_whole

#: what a job leaves in its folder beside the run's own files
RECORD, OUTPUT = "job.json", "output.txt"
#: what runs one
FIT = [sys.executable, "-P", "-m", "lit_pfl", "fit"]
#: seconds between two looks at what runs, and those that a run has to end in when it is asked to
PAUSE, PATIENCE = 0.1, 60.0


@dataclass(frozen=True)
class Job:
    """A run that there is to be.

    Args:
        folder: its run folder.
        arguments: what is typed after ``lit-pfl fit``; neither a run folder nor a checkpoint.
    """

    folder: Path
    arguments: tuple[str, ...]


class Outcome(NamedTuple):
    """What came of a job.

    Args:
        job: the job.
        state: ``done``; ``there``: it had been done before; ``failed``; ``stopped``: to be gone on with another time.
        seconds: how long it ran, all its processes together.
        message: of a failed job, the last line that it printed.
    """

    job: Job
    state: Literal["done", "there", "failed", "stopped"]
    seconds: float
    message: str = ""


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    output: BinaryIO
    since: float


def run_jobs(
    jobs: Iterable[Job],
    at_once: int | None = None,
    seconds: float | None = None,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run jobs, the first ones first, until each is done or has failed.

    A job whose folder holds a checkpoint goes on from it. One that another process is at work on is waited for, so that
    several runners may share the same jobs. SIGINT and SIGTERM stop every run at its last complete round; the same call
    goes on with them. A job that has been done is done again only where its arguments, or the configuration files that
    they name, are others: then it goes on from its checkpoint, which its command refuses if it became another run.

    Args:
        jobs: the jobs.
        at_once: number of processes; by default one a core. Each has its share of the cores.
        seconds: after this time no job is begun, and those that run are stopped; by default there is no end.
        tell: is called with every outcome as soon as it is known.

    Returns:
        The outcomes, in the order in which they came. Jobs that were not begun in time have none.

    Raises:
        KeyboardInterrupt: on SIGINT and SIGTERM, once every run has stopped.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = at_once or cores
    environment = {"OMP_NUM_THREADS": str(max(1, cores // at_once)), **os.environ}
    end = None if seconds is None else time.monotonic() + seconds
    waiting, running, outcomes = deque(jobs), list[_Running](), list[Outcome]()

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    with _interruptible():
        try:
            while (waiting or running) and (end is None or time.monotonic() < end):
                for _ in range(len(waiting)):  # each is looked at once: one in other hands goes to the end of the queue
                    if len(running) == at_once:
                        break
                    job = waiting.popleft()
                    if _is_done(job):
                        note(Outcome(job, "there", _record(job)["seconds"]))
                    elif (one := _begin(job, environment)) is None:
                        waiting.append(job)
                    else:
                        running.append(one)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    note(_ended(one))
                time.sleep(PAUSE if waiting or running else 0)
        finally:
            for outcome in _stopped(running):
                note(outcome)
    return outcomes


def _begin(job: Job, environment: dict[str, str]) -> _Running | None:
    """Start a job's process; None where it is in other hands."""
    job.folder.mkdir(parents=True, exist_ok=True)
    output = (job.folder / OUTPUT).open("ab")
    # The process has the locked file too, as its output: so the lock is there until it has ended, however we end, and
    # until its end is recorded, if we live.
    if not _lock(output) or _is_done(job):
        output.close()
        return None
    checkpoint = job.folder / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        where = ["--ckpt_path", str(checkpoint)]
    else:
        if _record(job):  # cut off before its first checkpoint: what is left of a round would be taken for a run
            (job.folder / "metrics.csv").unlink(missing_ok=True)
            shutil.rmtree(checkpoint.parent, ignore_errors=True)
        where = [f"--folder={job.folder}"]
    _write_record(job, done=False, seconds=_record(job).get("seconds", 0.0))
    process = subprocess.Popen(
        [*FIT, *job.arguments, *where],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that a Ctrl-C reaches it once, through us
    )
    return _Running(job, process, output, time.monotonic())


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ended(one: _Running) -> Outcome:
    """Take note of a process that has ended by itself."""
    code = one.process.returncode
    seconds = _record(one.job).get("seconds", 0.0) + time.monotonic() - one.since
    _write_record(one.job, done=code == 0, seconds=seconds)
    one.output.close()
    if code == 0:
        return Outcome(one.job, "done", seconds)
    lines = (one.job.folder / OUTPUT).read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with code {code}")
    return Outcome(one.job, "failed", seconds, said)


def _stopped(running: list[_Running]) -> Iterator[Outcome]:
    """Ask processes to stop; end those that do not."""
    for one in running:
        one.process.terminate()
    end = time.monotonic() + PATIENCE
    for one in running:
        try:
            one.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        outcome = _ended(one)  # it may have come to its end, or failed, just now
        stopped = one.process.returncode in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
        yield outcome._replace(state="stopped", message="") if stopped else outcome


@contextmanager
def _interruptible() -> Iterator[None]:
    """Take SIGTERM for a Ctrl-C. Elsewhere than in the main thread nobody can."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _is_done(job: Job) -> bool:
    record = _record(job)
    return bool(record) and record["done"] and record["job"] == _fingerprint(job)


def _record(job: Job) -> dict[str, Any]:
    """Return what was last noted of a job; empty where nothing was."""
    try:
        return json.loads((job.folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}


def _write_record(job: Job, done: bool, seconds: float) -> None:
    content = {"job": _fingerprint(job), "done": done, "seconds": seconds}
    write_whole(job.folder / RECORD, json.dumps(content))


def _fingerprint(job: Job) -> str:
    """Return a hash of a job's arguments and of the configuration files among them, with all that these build on."""
    digest = hashlib.sha256(json.dumps(job.arguments).encode())
    for argument in job.arguments:
        name = argument.removeprefix("--config=")
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            for file in with_fragments(name):
                digest.update(Path(file).read_bytes())
    return digest.hexdigest()
