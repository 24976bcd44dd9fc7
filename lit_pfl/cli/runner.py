"""Many runs: each a ``lit-pfl fit`` in a process and a folder of its own, several at once, and none done twice."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from joblib import cpu_count

from lit_pfl.cli.config_files import CONFIG, find, with_fragments
from lit_pfl.lightning_internals import signals_kept
from lit_pfl_callbacks.files import lock, write_whole

#: what a job leaves in its folder beside the run's own files
RECORD, OUTPUT = "job.json", "output.txt"
#: what runs one
FIT = [sys.executable, "-P", "-m", "lit_pfl", "fit"]
#: seconds between two looks at a run, and those that a run has to end in when it is asked to
PAUSE, PATIENCE = 0.1, 60.0
#: how a process ends that was asked to stop: by SIGTERM or SIGKILL, by an exit for the former, or as Windows ends one
STOPPED = (-15, -9, 128 + 15, *([1] if os.name == "nt" else []))


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
        state: ``done``; ``there``: it had been done before; ``failed``; ``stopped``: to be continued with another time.
        seconds: how long it ran, all its processes together.
        message: of a failed job, the last line that it printed.
    """

    job: Job
    state: Literal["done", "there", "failed", "stopped"]
    seconds: float
    message: str = ""


def run_jobs(
    jobs: Iterable[Job],
    at_once: int | None = None,
    seconds: float | None = None,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run jobs, the first ones first, until each is done or has failed.

    A job whose folder holds a checkpoint continues from it. One that another process is at work on is waited for, so
    that several runners may share the same jobs. SIGINT and SIGTERM stop every run at its last complete round; the
    same call continues with them. A job that has been done is done again only where its arguments, or the
    configuration files that they name, are others: then it continues from its checkpoint, which its command refuses if
    it became another run.

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
    cores = cpu_count()
    at_once = at_once or cores
    environment = {"OMP_NUM_THREADS": str(max(1, cores // at_once)), **os.environ}
    end = None if seconds is None else time.monotonic() + seconds
    left, stop, outcomes = list[Future[Job | Outcome]](), threading.Event(), list[Outcome]()

    def noted(came: Iterable[Future[Job | Outcome]]) -> Iterator[Job]:
        """Take note of outcomes; return the jobs that have none."""
        for result in (future.result() for future in came):
            if isinstance(result, Job):
                yield result
            else:
                outcomes.append(result)
                tell(result)

    with _interruptible(), ThreadPoolExecutor(at_once) as pool:
        try:
            if end is None or time.monotonic() < end:
                left += [pool.submit(_run, job, environment, stop) for job in jobs]
            while left and (end is None or time.monotonic() < end):
                done, _ = wait(left, None if end is None else end - time.monotonic(), FIRST_COMPLETED)
                came, left = [one for one in left if one in done], [one for one in left if one not in done]
                left += [pool.submit(_run, job, environment, stop) for job in noted(came)]  # in other hands till now
        finally:
            stop.set()
            list(noted(left))
    return outcomes


def _run(job: Job, environment: dict[str, str], stop: threading.Event) -> Job | Outcome:
    """Run a job; return the job itself where it is in other hands, or all are to stop."""
    if stop.is_set():
        return job
    if _is_done(job):
        return Outcome(job, "there", _record(job)["seconds"])
    job.folder.mkdir(parents=True, exist_ok=True)
    # The process has the locked file too, as its output: so the lock is there until it has ended, however we end, and
    # until its end is recorded, if we live.
    with (job.folder / OUTPUT).open("ab") as output:
        if not lock(output) or _is_done(job):
            stop.wait(PAUSE)
            return job
        process, since = _begun(job, environment, output), time.monotonic()
        while process.poll() is None and not stop.wait(PAUSE):
            pass
        asked = process.poll() is None
        if asked:
            _end(process)
        code, seconds = process.returncode, _record(job).get("seconds", 0.0) + time.monotonic() - since
        _write_record(job, done=code == 0, seconds=seconds)
    if code == 0:
        return Outcome(job, "done", seconds)
    if asked and code in STOPPED:
        return Outcome(job, "stopped", seconds)
    lines = (job.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with code {code}")
    return Outcome(job, "failed", seconds, said)


def _begun(job: Job, environment: dict[str, str], output: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a job's process."""
    checkpoint = job.folder / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        where = ["--ckpt_path", str(checkpoint)]
    else:
        if _record(job):  # cut off before its first checkpoint: what is left of a round would be taken for a run
            (job.folder / "metrics.csv").unlink(missing_ok=True)
            shutil.rmtree(checkpoint.parent, ignore_errors=True)
        where = [f"--folder={job.folder}"]
    _write_record(job, done=False, seconds=_record(job).get("seconds", 0.0))
    return subprocess.Popen(
        [*FIT, *job.arguments, *where],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that a Ctrl-C reaches it once, through us
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to stop; end it if it does not."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Take SIGTERM for a Ctrl-C. Elsewhere than in the main thread nobody can."""
    with signals_kept() as settable:
        if settable:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield


def _is_done(job: Job) -> bool:
    record = _record(job)
    return bool(record) and record["done"] and record["job"] == _fingerprint(job)


def _record(job: Job) -> dict[str, Any]:
    """Return what was last noted of a job; empty where nothing was."""
    try:
        return json.loads((job.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_record(job: Job, done: bool, seconds: float) -> None:
    content = {"job": _fingerprint(job), "done": done, "seconds": seconds}
    write_whole(job.folder / RECORD, json.dumps(content))


def _fingerprint(job: Job) -> str:
    """Return a hash of a job's arguments and of the configuration files among them, with all that these build on."""
    digest = hashlib.sha256(json.dumps(job.arguments).encode())
    for before, argument in pairwise(("", *job.arguments)):
        name = argument.removeprefix("--config=")
        is_config = before in CONFIG or name != argument or name.endswith((".yaml", ".yml"))
        if is_config and (found := find(name)) is not None:
            for file in with_fragments(str(found)):
                digest.update(Path(file).read_bytes())
    return digest.hexdigest()
