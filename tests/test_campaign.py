"""A fault campaign: clients drop out, lag and send bad uploads, processes are killed, disks fill up.

``pytest -m slow tests/test_campaign.py --campaign 100`` plays 100 seeds, from ``--first-seed`` on. Every run ends. One
that was struck and then resumed is the run that never was struck, in which nothing came from the clients that send bad
uploads.
"""

import csv
from pathlib import Path

import pytest

from campaign import BAD, Came, case, run
from lit_pfl.lightning_internals import read_checkpoint
from tiny import assert_equal

pytestmark = pytest.mark.slow
TABLES = ("metrics.csv", "clients.csv")


def pytest_generate_tests(metafunc):
    first = metafunc.config.getoption("--first-seed")
    metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--campaign")))


def refused(folder: Path) -> list[tuple[int, int]]:
    path = folder / "refused.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [(int(row["round"]), int(row["client"])) for row in csv.DictReader(file)]


def spoiled(log: Path) -> set[tuple[int, int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    assert {line.split(",")[2] for line in lines} <= BAD.keys()
    return {(int(line.split(",")[0]), int(line.split(",")[1])) for line in lines}


def resumed_by(words: list[str], folder: Path, came: Came) -> list[str]:
    """Return what to type after a run was struck: what it printed, or if it could not what the guide says."""
    printed = [line for line in came.out.splitlines() if "--ckpt_path" in line and line.startswith("lit-pfl fit")]
    if printed:
        return printed[-1].split()[1:]
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        return ["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)]
    return words


def test_a_struck_run_that_is_resumed_is_the_run_that_never_was(seed, tmp_path):
    words, strikes = case(seed)
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    plain = run([*words, "--trainer.callbacks.send", "false", "--folder", str(whole)], whole)
    assert plain.code == 0, plain.out

    log = tmp_path / "spoiled.csv"
    first = [*words, "--trainer.callbacks.notes", str(log), "--folder", str(struck)]
    typed, came, codes = first, None, []
    for strike in strikes:
        came = run(typed, struck, strike, plain.whole)
        codes.append(came.code)
        assert "Traceback" not in came.out, (strike, came.out)
        # SIGTERM ends a fit in good order with 143, and a process that has not come to its fit at once with -15
        assert came.code in (0, 2, 143, -9, -15), (strike, came.out)
        if came.code == 0:
            break
        typed = resumed_by(first, struck, came)
    if came.code != 0:
        came = run(typed, struck)
        assert came.code == 0, (strikes, typed, came.out)

    for name in TABLES:
        assert (struck / name).read_bytes() == (whole / name).read_bytes(), (name, strikes)
    states = [read_checkpoint(folder / "checkpoints/last.ckpt")["federation"] for folder in (whole, struck)]
    assert_equal(*states)
    assert refused(struck) == refused(whole)
    assert spoiled(log) <= set(refused(struck))
    ended = [f"{strike.kind}: {code}" for strike, code in zip(strikes, codes, strict=False)]
    print(f"{seed} {words[2]} {ended}, {len(spoiled(log))} bad uploads, {len(refused(struck))} refused")
