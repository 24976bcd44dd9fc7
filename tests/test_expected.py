"""The expected results on the methods' pages: every method has one, and a command gives what its page promises."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

import lit_pfl.methods
from cli.typed import ROOT, rows, typed

FILE = ROOT / "docs/extensions/expected.py"
METHODS = lit_pfl.methods.__all__


@pytest.fixture(scope="module")
def expected():
    spec = importlib.util.spec_from_file_location("expected", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_is_measured_with_two_seeds_or_more(expected):
    runs = [(row["method"], int(row["seed"])) for row in expected.rows()]
    assert len(runs) == len(set(runs))
    assert {(method, seed) for method in METHODS for seed in expected.SEEDS[:2]} <= set(runs)
    assert {method for method, _ in runs} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_page_has_the_command_and_its_result(expected, method):
    shown = expected.shown(method)
    mine = expected.scores(expected.by_method()[method])
    assert f"\nlit-pfl fit --config {method.lower()}" in shown
    assert f"**Expected:** {mine} (" in shown
    assert "±" in mine


@pytest.mark.few(3)
@pytest.mark.parametrize("method", METHODS)
def test_the_command_is_accepted(expected, method, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # adapters: examples/
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:  # of another package
        monkeypatch.delitem(sys.modules, name)
    if issubclass(getattr(lit_pfl.methods, method), lit_pfl.methods.FedIT):
        pytest.importorskip("peft")
    came = typed(capsys, *expected.arguments(method), "--seed_everything=1", "--print_config")
    assert (came.code, came.errors) == (0, [])


@pytest.mark.slow
def test_the_command_gives_what_is_expected(expected, capsys, tmp_path, monkeypatch):
    """As a reader types it."""
    monkeypatch.chdir(tmp_path)
    shown = expected.shown("FedPer")
    command = next(line for line in shown.splitlines() if line.startswith("lit-pfl fit"))
    came = typed(capsys, *shlex.split(command)[1:])
    assert (came.code, came.errors) == (0, [])
    [path] = Path("runs").rglob("metrics.csv")
    measured = expected.by_method()["FedPer"][0]  # on another CPU perhaps, which rounds sums otherwise
    last = rows(path)[-1]
    for column, state in (("test/acc", "trained"), ("test/aggregated/acc", "aggregated")):
        assert 100 * float(last[column]) == pytest.approx(float(measured[state]), abs=5.0)
