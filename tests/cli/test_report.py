"""``lit-pfl report``: which runs, where to, and what is said when it cannot be."""

import importlib.util
from pathlib import Path

import pytest

from cli.typed import typed
from report.made import make_run, make_runs


@pytest.mark.seconds
def test_a_single_run_has_its_report_in_its_folder(capsys):
    make_run(Path("runs/a"), "FedAvg", 1, clients=3, rounds=2)
    came = typed(capsys, "report", "runs/a")
    assert (came.code, came.out.strip()) == (0, str(Path("runs/a/report.html").absolute()))
    assert Path("runs/a/report/over_rounds.png").exists()


@pytest.mark.seconds
def test_several_have_it_where_they_all_lie(capsys):
    make_runs(Path("runs"), ["SimFed", "FedAvg"], [1, 2], clients=3, rounds=2)
    typed(capsys, "report", "runs/SimFed", "runs/FedAvg/seed_1", "./runs/FedAvg/", "--no_pictures")
    page = Path("runs/report.html").read_text()
    assert "<h1>SimFed and FedAvg</h1>" in page
    assert "4 runs" in page
    assert not Path("runs/report").exists()


@pytest.mark.slow
def test_it_goes_where_it_is_told(capsys):
    make_run(Path("a"), "FedAvg", 1, clients=3, rounds=2)
    typed(capsys, "report", "a", "--output", "there/it.html", "--no_pictures")
    assert Path("there/it.html").exists()
    came = typed(capsys, "report", "a", "--output", "page")
    assert Path("page.html").is_file()
    assert Path("page").is_dir()
    assert came.out.strip() == "page.html"


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_a_folder_is_no_name_of_a_page(folder, capsys):
    Path("x").mkdir()
    Path("x/metrics.csv").write_text("round,val/acc\n1,0.5\n")
    came = typed(capsys, "report", "x", "--output", folder)
    assert came.errors == [f"lit-pfl: error: --output={folder}: that is a folder; give the name of a file in it."]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "runs: there is no folder x."),
        (lambda: Path("x").mkdir(), "runs: neither x nor a folder in it holds a metrics.csv, which every run has."),
        (
            lambda: (Path("x").mkdir(), Path("x/metrics.csv").touch()),
            "runs: x has no round in its metrics.csv; leave it out.",
        ),
    ],
)
def test_what_is_no_run_is_named(capsys, make, said):
    make()
    came = typed(capsys, "report", "x")
    assert (came.code, came.errors) == (2, [f"lit-pfl: error: {said}"])


def test_without_the_charting_library_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    make_run(Path("a"), "FedAvg", 1)
    came = typed(capsys, "report", "a")
    assert came.errors == ["lit-pfl: error: A report needs Altair and vl-convert: pip install 'lit-pfl[report]'."]
