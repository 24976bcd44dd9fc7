"""Many runs: none twice, none in two processes, each at its last complete round when it is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cli.typed import ROOT, TINY, rows
from lit_pfl.cli import runner
from lit_pfl.cli.runner import Job, run_jobs

#: in place of ``lit-pfl fit``: rounds with a checkpoint each, a line in ``log`` at every beginning. It waits for a file
#: ``first`` before the first round, and ``then`` before the second.
FIT = """
import sys, time
from pathlib import Path

words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:] if "=" in word)
if "--ckpt_path" in sys.argv:
    folder = Path(sys.argv[sys.argv.index("--ckpt_path") + 1]).parent.parent
else:
    folder = Path(words["folder"])
    if (folder / "metrics.csv").exists():
        sys.exit("there is a run")
(folder / "metrics.csv").touch()
checkpoint = folder / "checkpoints/last.ckpt"
done = int(checkpoint.read_text()) if checkpoint.exists() else 0
with open("log", "a") as log:
    log.write(f"{folder.name} {done}\\n")
for round in range(done + 1, int(words.get("rounds", 1)) + 1):
    while (gate := words.get({1: "first", 2: "then"}.get(round))) and not Path(gate).exists():
        time.sleep(0.01)
    checkpoint.parent.mkdir(exist_ok=True)
    unfinished = checkpoint.with_name("part")
    unfinished.write_text(str(round))
    unfinished.replace(checkpoint)
if "fails" in words:
    sys.exit("lit-pfl: error: " + words["fails"])
"""


@pytest.fixture
def fit(monkeypatch, tmp_path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    monkeypatch.setattr(runner, "FIT", [sys.executable, str(tmp_path / "fit.py")])


def begun() -> list[str]:
    return Path("log").read_text().splitlines()


def jobs(*names: str, **words: object) -> list[Job]:
    return [Job(Path("all") / name, tuple(f"--{key}={value}" for key, value in words.items())) for name in names]


def states(outcomes: list[runner.Outcome]) -> dict[str, str]:
    return {outcome.job.folder.name: outcome.state for outcome in outcomes}


def wait_for(*paths: str) -> None:
    end = time.monotonic() + 300
    while not all(map(os.path.exists, paths)):
        assert time.monotonic() < end, f"no {paths}"
        time.sleep(0.02)


def interrupted(jobs: list[Job], *when: str) -> list[runner.Outcome]:
    """Run jobs up to a Ctrl-C, which comes as soon as certain files are there."""
    told: list[runner.Outcome] = []

    def interrupt() -> None:
        wait_for(*when)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tell=told.append)
    thread.join()
    return told


def test_jobs_are_done_once_and_in_order(fit):
    told = []
    first = run_jobs(jobs("a", "b", "c"), at_once=1, tell=told.append)
    again = run_jobs(jobs("a", "b", "c", "d"), at_once=1)
    assert states(first) == {"a": "done", "b": "done", "c": "done"}
    assert told == first
    assert states(again) == {"a": "there", "b": "there", "c": "there", "d": "done"}
    assert begun() == ["a 0", "b 0", "c 0", "d 0"]
    assert [outcome.seconds for outcome in again[:3]] == [outcome.seconds for outcome in first]


def test_several_run_at_once(fit):
    waits = jobs("a", "b", first="all/c/checkpoints/last.ckpt")
    assert states(run_jobs([*waits, *jobs("c")], at_once=3)) == {"a": "done", "b": "done", "c": "done"}


def test_a_failure_is_told_by_its_last_line_and_the_others_go_on(fit):
    outcomes = run_jobs([*jobs("a", fails="model.tau=x: expected a number."), *jobs("b")], at_once=1)
    assert states(outcomes) == {"a": "failed", "b": "done"}
    assert outcomes[0].message == "lit-pfl: error: model.tau=x: expected a number."
    assert states(run_jobs(jobs("a"), at_once=1)) == {"a": "done"}


def test_when_time_is_up_what_runs_is_stopped_and_nothing_is_begun(fit):
    assert states(run_jobs(jobs("a", "b", first="never"), at_once=1, seconds=0.5)) == {"a": "stopped"}


def test_what_was_cut_off_goes_on_from_its_checkpoint(fit):
    stopped = interrupted(jobs("a", rounds=3, then="go"), "all/a/checkpoints/last.ckpt")
    assert states(stopped) == {"a": "stopped"}
    Path("go").touch()
    whole = run_jobs(jobs("a", rounds=3, then="go"))
    assert states(whole) == {"a": "done"}
    assert begun() == ["a 0", "a 1"]
    assert whole[0].seconds > stopped[0].seconds > 0


def test_what_was_cut_off_before_its_first_checkpoint_begins_anew(fit):
    assert states(interrupted(jobs("a", first="go"), "log")) == {"a": "stopped"}
    assert Path("all/a/metrics.csv").exists()
    Path("go").touch()
    assert states(run_jobs(jobs("a", first="go"))) == {"a": "done"}


@pytest.mark.slow
def test_a_job_begun_anew_with_other_options_keeps_nothing_of_what_it_was_before(tmp_path):
    job = Job(tmp_path / "cut", (*TINY, "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"))
    job.folder.mkdir()
    (job.folder / runner.RECORD).write_text('{"job": "another", "done": false, "seconds": 1.0}')
    (job.folder / "metrics.csv").write_text("round\n1\n")
    for name in ("config.yaml", "partition.csv"):
        (job.folder / name).write_text("# lit-pfl 0.1.0\nof before")
    assert states(run_jobs([job])) == {"cut": "done"}
    for name in ("config.yaml", "partition.csv"):
        assert "of before" not in (job.folder / name).read_text()


def test_a_run_that_somebody_else_made_is_not_removed(fit):
    Path("all/a").mkdir(parents=True)
    Path("all/a/metrics.csv").touch()
    (outcome,) = run_jobs(jobs("a"))
    assert (outcome.state, outcome.message) == ("failed", "there is a run")


def test_other_arguments_or_another_file_are_another_job(fit):
    Path("base.yaml").write_text("seed_everything: 1")
    Path("one.conf").write_text("fragments: [base.yaml]")  # whatever its ending
    job = [Job(Path("all/a"), ("--config", "one.conf"))]
    assert states(run_jobs(job)) == {"a": "done"}
    assert states(run_jobs(job)) == {"a": "there"}
    Path("base.yaml").write_text("seed_everything: 2")
    assert states(run_jobs(job)) == {"a": "done"}
    assert states(run_jobs([Job(Path("all/a"), ("--config=one.conf", "--rounds=2"))])) == {"a": "done"}
    assert begun() == ["a 0", "a 1", "a 1"]


def test_two_runners_share_the_jobs(fit):
    both: list[list[runner.Outcome]] = [[], []]
    shared = jobs("a", "b", "c", "d")
    threads = [threading.Thread(target=lambda i=i: both[i].extend(run_jobs(shared, at_once=1))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun()) == ["a 0", "b 0", "c 0", "d 0"]
    done = [{name for name, state in states(outcomes).items() if state == "done"} for outcomes in both]
    assert done[0] | done[1] == set("abcd")
    assert not done[0] & done[1]
    assert states(both[0]).keys() == states(both[1]).keys() == set("abcd")


RUN = """
import sys
from pathlib import Path
from lit_pfl.cli import runner
runner.FIT = [sys.executable, "fit.py"]
runner.run_jobs([runner.Job(Path("all") / name, ("--rounds=2", "--then=go")) for name in "ab"], at_once=2)
"""


def other_runner() -> "subprocess.Popen[bytes]":
    """Start the jobs a and b in a process of its own, and wait until each has had its first round."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "callbacks")])
    process = subprocess.Popen([sys.executable, "-c", RUN], env={**os.environ, "PYTHONPATH": path})
    wait_for("all/a/checkpoints/last.ckpt", "all/b/checkpoints/last.ckpt")
    return process


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_run(fit, signum):
    process = other_runner()
    process.send_signal(signum)
    assert process.wait(300) != 0
    Path("go").touch()
    assert states(run_jobs(jobs("a", "b", rounds=2, then="go"))) == {"a": "done", "b": "done"}
    assert sorted(begun()) == ["a 0", "a 1", "b 0", "b 1"]


@pytest.mark.slow
def test_runs_whose_runner_was_killed_are_waited_for(fit):
    process = other_runner()
    process.kill()
    process.wait()
    begun_before = []

    def go() -> None:
        begun_before.extend(begun())
        Path("go").touch()

    timer = threading.Timer(1.0, go)
    timer.start()
    assert states(run_jobs(jobs("a", "b", rounds=2, then="go"))) == {"a": "done", "b": "done"}
    timer.join()
    assert sorted(begun_before) == ["a 0", "b 0"]
    assert sorted(begun()) == ["a 0", "a 2", "b 0", "b 2"]


@pytest.mark.slow
def test_a_federation_that_was_stopped_is_the_same_as_one_that_was_not(tmp_path):
    def job(name: str) -> Job:
        return Job(tmp_path / name, (*TINY, "--trainer.max_epochs=4", "--trainer.enable_progress_bar=false"))

    interrupted([job("cut")], "cut/checkpoints/last.ckpt")
    assert len(rows(tmp_path / "cut/metrics.csv")) < 4
    assert states(run_jobs([job("cut"), job("whole")])) == {"cut": "done", "whole": "done"}
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
