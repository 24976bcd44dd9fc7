"""``lit-pfl compare``: what is run, what is not run again, and what it ends with."""

import os
import sys
from pathlib import Path

import pytest

from cli.typed import ROOT, TINY, typed
from lit_pfl.cli import runner
from lit_pfl.cli.compare import make_jobs
from lit_pfl.errors import ConfigError
from report.browser import opened
from report.test_page import check_charts

#: in place of ``lit-pfl fit``: a run of random numbers; a line in ``log``
FIT = """
import sys
from pathlib import Path
from report.made import make_run

words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:] if "=" in word)
method = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else "SimFed"
with open("log", "a") as log:
    log.write(f"{method} {words['seed_everything']}\\n")
if method == "FactorizedFL":
    sys.exit("lit-pfl: error: no such thing.")
folder = Path(words["folder"])
make_run(folder, method, int(words["seed_everything"]), clients=3, rounds=2)
"""


@pytest.fixture
def fit(monkeypatch, tmp_path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    monkeypatch.setattr(runner, "FIT", [sys.executable, str(tmp_path / "fit.py")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT), str(ROOT / "callbacks")]))


def begun() -> list[str]:
    return sorted(Path("log").read_text().splitlines())


@pytest.mark.slow
def test_what_is_missing_is_run_and_what_is_there_is_not(fit, capsys):
    came = typed(capsys, "compare", "--methods", "SimFed", "FedAvg", "--seeds", "1", "2")
    assert came.code == 0
    assert begun() == ["FedAvg 1", "FedAvg 2", "SimFed 1", "SimFed 2"]
    assert "| method | seeds | accuracy (%) |" in came.out
    assert "| row less column | SimFed | FedAvg |" in came.out
    assert "Report: runs/compare/report.html" in came.out
    assert "<h1>SimFed and FedAvg</h1>" in Path("runs/compare/report.html").read_text()
    came = typed(capsys, "compare", "--methods", "SimFed", "FedAvg", "StandAlone", "--seeds", "1", "2")
    assert begun() == ["FedAvg 1", "FedAvg 2", "SimFed 1", "SimFed 2", "StandAlone 1", "StandAlone 2"]
    assert "SimFed/seed_1: there" in came.out


@pytest.mark.slow
def test_a_failure_is_told_and_the_rest_is_shown(fit, capsys):
    came = typed(capsys, "compare", "--methods", "FactorizedFL", "FedAvg", "--seeds", "1")
    assert "FactorizedFL/seed_1: failed" in came.out
    assert "lit-pfl: error: no such thing." in came.out
    assert "| FedAvg | 1 |" in came.out
    assert came.code == 2
    assert "1 of 2 runs failed, the first in runs/compare/FactorizedFL/seed_1" in came.errors[0]


def test_a_methods_own_file_comes_before_what_all_have_in_common():
    Path("my_simfed.yaml").write_text("model: {class_path: SimFed, init_args: {tau: 0.5}}")
    common = "{trainer: {max_epochs: 5}}"
    one, other = make_jobs(["my_simfed.yaml", "FedAvg"], [7], [common], Path("out"))
    assert one.folder == Path("out/my_simfed/seed_7")
    assert one.arguments[:4] == ("--config", "my_simfed.yaml", "--config", common)
    assert other.folder == Path("out/FedAvg/seed_7")
    assert other.arguments[:6] == ("--model", "FedAvg", "--config", common, "--model", "FedAvg")
    assert one.arguments[-1] == other.arguments[-1] == "--seed_everything=7"


@pytest.mark.parametrize(
    ("methods", "seeds", "configs", "said"),
    [
        (["SimFeed"], [1], [], "there is no 'SimFeed'; choose of .*SimFed"),
        (["SimFed", "SimFed"], [1], [], "SimFed is there twice"),
        (["SimFed"], [1, 1], [], "--seeds: 1 is there twice"),
        (["SimFed"], [1, -1], [], "^--seeds: -1; give whole numbers from 0 to 4294967295"),
        (["none.yaml"], [1], [], "there is no file none.yaml"),
        (["one.yaml"], [1], ["{trainer:\n {max_epochs: 5}"], r"^--config: {trainer: .* is not YAML: [^\n]+$"),
        (["one.yaml"], [1], ["{model: FedAvg}"], "would replace that of one.yaml"),
        (["one.yaml"], [1], ["{model: {class_path: FedAvg}}"], "would replace that of one.yaml"),
    ],
)
def test_what_cannot_be_compared_is_refused(methods, seeds, configs, said):
    Path("one.yaml").write_text("model: SimFed")
    with pytest.raises(ConfigError, match=said):
        make_jobs(methods, seeds, configs, Path("out"))


@pytest.mark.slow
@pytest.mark.long
def test_a_real_comparison_of_two_methods_and_two_seeds_opens(capsys):
    methods = ["SimFed", "FactorizedFL"]
    smaller = "{data: {init_args: {num_clients: 4}}, trainer: {max_epochs: 2}}"
    came = typed(capsys, "compare", "--methods", *methods, "--seeds", "1", "2", *TINY, "--config", smaller)
    assert came.code == 0
    assert came.out.count(": done") == 4
    with opened(Path("runs/compare/report.html")) as page:
        check_charts(page)
        shown = [node.text_content() for node in page.query_selector_all("#results table:first-of-type td:first-child")]
        assert shown[:2] == methods
