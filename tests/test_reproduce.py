"""The runner of the papers' tables: what it reads, what it writes, and that it can be stopped at any time."""

import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lit_pfl.cli import main
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import read_checkpoint
from lit_pfl.methods import FactorizedFL
from lit_pfl.models import ResNet9
from lit_pfl.nn import factorized_layers
from tiny import spec

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "reproduce" / "run.py"
PAPERS = ROOT / "configs" / "paper"
TABLES = [
    (path.parent.name, table)
    for path in sorted(PAPERS.glob("*/tables.yaml"))
    for table in yaml.load(path.read_text(), yaml.BaseLoader)
]
FEW = "digits data.train_fraction=0.1"


@pytest.fixture(scope="module")
def reproduce():
    """The modules beside the script."""
    names = ("tables", "results", "judge", "page", "run", "states")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def printed(reproduce):
    """All tables of the papers."""
    return {(paper, name): reproduce.tables.Table(PAPERS / paper, name) for paper, name in TABLES}


@pytest.fixture
def tiny(tmp_path):
    """A folder of papers with one small table, at two scales."""
    paper = tmp_path / "papers" / "tiny"
    contents = {
        "rows/alone": {"model": {"class_path": "StandAlone"}},
        "rows/averaged": {"model": {"class_path": "FedAvg"}},
        "rows/same": {"fragments": ["averaged.yaml"]},
        "digits": {
            "model": {"init_args": {"backbone": {"class_path": "MLP"}}},
            "data": {"class_path": "Digits", "init_args": {"num_clients": 4, "evaluate_on": "all", "batch_size": 32}},
            "federation": {"local_epochs": 1, "threads": 1},
            "trainer": {"max_epochs": 10, "accelerator": "cpu"},
        },
        "middle": {"trainer": {"max_epochs": 2}},
    }
    for name, content in contents.items():
        path = paper / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    (paper / "tables.yaml").write_text("""
table1:
  title: Tiny, Table 1
  about: Digits.
  columns: {All: digits, Few: &few [digits, data.train_fraction=0.1], First: {run: *few, clients: [0]}}
  rows:
    Stand-Alone: rows/alone
    FedAvg: rows/averaged
    FedAvg, again: {run: rows/same, as: FedAvg}
  first: {columns: [Few], rows: [FedAvg]}
  printed:
    Stand-Alone: [90.00 ± 0.10, 64.20 ± xx.x, ~50]
    FedAvg: [91.5 ± 1.4, 70, 60.00]
  cost: {FedAvg: 20.39}
""")
    return tmp_path


def declared(reproduce, folder: Path, text: str, *scale: str):
    """Write the file of tables of the small paper anew; return its one table."""
    path = folder / "papers" / "tiny" / "tables.yaml"
    path.write_text(text)
    [name] = yaml.safe_load(text)
    return reproduce.tables.Table(path.parent, name, *scale)


def arguments(folder: Path, *options: str) -> list[str]:
    places = ["--papers", folder / "papers", "--runs", folder / "runs", "--results", folder / "results"]
    return ["tiny", "table1", *map(str, places), "--at_once=2", *options]


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments(folder, *options)]


# ------------------------------------------------------------------------------------------------ what the papers print


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_table_is_whole(printed, paper, name):
    table = printed[paper, name]
    assert table.runs()
    for run, _ in table.runs():
        assert run.rounds >= 20
        assert re.fullmatch(r"[\w.+=-]{20,200}", run.folder)
    for row in table.rows:
        for column in table.columns:
            cell = table.cell(row, column)
            assert cell.show in ("accuracy", "cost", "parameters", "nothing")
            if re.fullmatch(r"\d[\d.]*( ± [\dx.]+)?", cell.printed):
                assert cell.number == float(cell.printed.partition(" ± ")[0])
            else:
                assert cell.printed in ("", "~68")
                assert cell.number is None
            if cell.run is not None and cell.show == "accuracy":
                assert 1 < cell.number < 100 if cell.number is not None else True
    assert all(table.stands_for(row) in table.rows for row in table.rows)
    assert set(table.printed) <= set(table.rows)
    assert set(table.cost) <= set(table.printed)
    for kind, names in table._first.items():
        assert set(names) <= set(getattr(table, kind))


def test_what_a_paper_prints_twice_is_the_same_number(printed):
    """Cells of one configuration in two tables: a slip in carrying them over would show. Exceptions are the papers'."""
    seen: dict[tuple, dict[str, str]] = {}
    for (paper, name), table in printed.items():
        for row in table.printed:
            for column in table.columns:
                cell = table.cell(row, column)
                if cell.run is not None and cell.number is not None:
                    key = (cell.run.fingerprint, cell.show, cell.model if cell.show != "cost" else None, cell.clients)
                    seen.setdefault(key, {})[f"{paper} {name} {row} {column}"] = cell.printed.partition(" ± ")[0]
    twice = [places for places in seen.values() if len(places) > 1]
    assert len(twice) > 25
    differing = {tuple(sorted(set(places.values()))) for places in twice if len(set(places.values())) > 1}
    assert differing == {
        ("64.22", "64.51"), ("81.46", "82.19"),  # FedSLR: two local epochs in Tables 1 and 6
        ("88", "88.26"), ("84", "84.13"),  # Psi-Net: Table 1 and Fig. 5
        ("65", "65.3"),  # Psi-Net: Table 3 and Fig. 6
        ("61.29", "61.95"),  # Factorized-FL: Fig. 8 (h) and (i)
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- order and results


def test_a_run_lays_files_and_options_over_each_other(reproduce, tiny):
    (tiny / "papers" / "rows").mkdir()
    (tiny / "papers" / "rows" / "shared.yaml").write_text("model: {class_path: SimFed}")
    text = """
table1:
  title: Tiny
  about: Digits.
  columns: {Digits: {run: [digits, "model.backbone.width={width}", data.train_fraction=null], width: 2}}
  rows: {SimFed: {run: [rows/shared, model.alpha=1.0e-3], over: [model.class_path=FedAvg, trainer.max_epochs=3]}}
"""
    run = declared(reproduce, tiny, text, "middle").cell("SimFed", "Digits").run
    backbone = {"class_path": "MLP", "init_args": {"width": 2}}
    assert run.configuration["model"] == {"class_path": "FedAvg", "init_args": {"alpha": 0.001, "backbone": backbone}}
    assert (run.rounds, run.configuration["data"]["init_args"]["train_fraction"]) == (3, None)
    assert run.folder == (
        f"shared+alpha=1.0e-3+digits+width=2+train_fraction=null+middle+class_path=FedAvg+max_epochs=3-{run.fingerprint}"
    )
    assert yaml.safe_load(run.text) == run.configuration
    with pytest.raises(
        ConfigError, match=r"There is no .*tiny/rows/none.yaml, nor one of that name in the two folders"
    ):
        reproduce.tables.Run("paper", ("rows/none",), run.reader).fingerprint  # noqa: B018


def test_the_most_telling_cells_come_first_and_a_run_once(reproduce, tiny):
    table = reproduce.tables.Table(tiny / "papers" / "tiny", "table1")
    runs = [(run.name, seed) for run, seed in table.runs(seeds=[1, 2])]
    few, both = [f"rows/{row} {FEW}" for row in ("averaged", "alone")], ("averaged", "alone")
    assert runs == [(name, seed) for seed in (1, 2) for name in few] + [
        (f"rows/{row} digits", seed) for seed in (1, 2) for row in both
    ]
    assert [run.name for run, _ in table.runs(columns=["All"], rows=["Stand-Alone"])] == ["rows/alone digits"]
    middle = reproduce.tables.Table(tiny / "papers" / "tiny", "table1", "middle")
    assert [run.rounds for run, _ in middle.runs()] == [2] * 4
    with pytest.raises(ConfigError, match=r"--rows 'FedAvg2': tiny table1 has Stand-Alone; FedAvg; FedAvg, again"):
        table.runs(rows=["FedAvg2"])


@pytest.mark.parametrize(
    ("paper", "name", "scale", "message"),
    [
        ("tiny", "table9", "paper", "table9: tiny has table1"),
        ("other", "table1", "paper", "other: choose one of tiny"),
        ("tiny", "table1", "reduced", "--scale reduced: tiny has paper, middle"),
    ],
)
def test_what_is_not_there_is_said(reproduce, tiny, paper, name, scale, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        reproduce.tables.Table(tiny / "papers" / paper, name, scale)


def planned(reproduce, *arguments: str) -> list[tuple[str, int]]:
    options = reproduce.run.parser().parse_args(list(arguments))
    options.further = []
    return [
        (f"{one.run.paper} {one.run.name}", one.seed) for one in reproduce.run.Reproduction(options).planned.values()
    ]


@pytest.mark.parametrize("plan", sorted(SCRIPT.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_plans_name_what_there_is(reproduce, plan):
    runs = planned(reproduce, "--plan", str(plan), "--seeds", "1", "2")
    first = {
        "gpu": "simfed rows/stand_alone data/cifar10 data/permuted protocol",
        "middle": "factorized_fl rows/stand_alone data/cifar10 noniid data/permuted label middle",
    }
    assert runs[0] == (first[plan.stem], 1)
    assert len(runs) == len(set(runs)) > 30
    assert {seed for _, seed in runs} == {1, 2}


def test_a_plan_that_says_something_else_is_refused(reproduce, tmp_path):
    plan = tmp_path / "plan.yaml"
    for content, said in (("", "give a list of tables"), ("- {", "is not YAML")):
        plan.write_text(content)
        with pytest.raises(ConfigError, match=f"plan.yaml.*{said}"):
            planned(reproduce, "--plan", str(plan))
    plan.write_text("- {paper: simfed, table: table1, row: SimFed}")
    with pytest.raises(ConfigError, match=r"plan.yaml: .*'row': 'SimFed'.*: give paper, table and, if need be, scale"):
        planned(reproduce, "--plan", str(plan))


def result(run, seed: int, acc: list[float], scale: str = "paper", **more) -> dict:
    mean, worst = statistics.fmean(acc), min(acc)
    return {
        "run": run.name, "scale": scale, "configuration": run.fingerprint, "seed": seed, "rounds": 4,
        "scores": {"test/acc": mean, "test/acc_worst10": worst, "test/GKR/acc": 0.5, "test/parameters": 2_500_000},
        "clients": {"personalized": acc, "GKR": [0.5] * len(acc)}, "elements": 250_000_000, "parameters": 1.0,
        "device": "cpu", "at_once": 2, "seconds": 10.0 * seed, **more,
    }  # fmt: skip


def test_results_lie_in_order_and_go_by_their_configuration(reproduce, tiny):
    table = reproduce.tables.Table(tiny / "papers" / "tiny", "table1")
    runs = [run for run, _ in table.runs()]
    orders = []
    for folder, order in (("one", 1), ("other", -1)):
        results = reproduce.results.Results(tiny / folder / "tiny.jsonl")
        for seed, run in [(seed, run) for seed in (1, 2, 10) for run in runs][::order]:
            results.add(result(run, seed, [0.5, 0.7]))
        orders.append(results.path.read_text())
    assert orders[0] == orders[1]
    assert results.of(table.cell("FedAvg, again", "Few").run, 2) == results.of(table.cell("FedAvg", "Few").run, 2)
    assert [r["seed"] for r in results.of_all_seeds(runs[0])] == [1, 2, 10]
    assert results.of(runs[0], 3) is None
    column = tiny / "papers" / "tiny" / "tables.yaml"
    column.write_text("# a comment changes nothing\n" + column.read_text())
    again = reproduce.tables.Table(tiny / "papers" / "tiny", "table1").cell("FedAvg", "Few").run
    assert results.of(again, 1) is not None
    column.write_text(column.read_text().replace("fraction=0.1", "fraction=0.2"))
    changed = reproduce.tables.Table(tiny / "papers" / "tiny", "table1").cell("FedAvg", "Few").run
    assert results.of(changed, 1) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "reproduction").glob("*.jsonl")), ids=lambda path: path.stem)
def test_what_was_measured_is_of_configurations_there_are(reproduce, path):
    """Whoever changes a paper's configuration takes out what was measured with the former one."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    tables = [name for paper, name in TABLES if paper == path.stem]
    of_now = {
        run.fingerprint
        for scale in {result["scale"] for result in results}
        for name in tables
        for run, _ in reproduce.tables.Table(PAPERS / path.stem, name, scale).runs()
    }
    assert [result["run"] for result in results if result["configuration"] not in of_now] == []


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_has_both_numbers_and_says_which_orderings_hold(reproduce, tiny):
    table = reproduce.tables.Table(tiny / "papers" / "tiny", "table1")
    results = reproduce.results.Results(tiny / "tiny.jsonl")
    measured = {("Stand-Alone", "All"): (0.9, 0.92), ("FedAvg", "All"): (0.8, 0.81), ("FedAvg", "Few"): (0.7, 0.7),
                ("Stand-Alone", "Few"): (0.6, 0.61)}  # fmt: skip
    for (row, column), means in measured.items():
        for seed, mean in enumerate(means, 1):
            results.add(result(table.cell(row, column).run, seed, [mean - 0.1, mean + 0.1]))
    text = reproduce.page.page(table, results)
    assert "\n- All: 1 orderings (too few seeds: 1)\n" in text
    assert "| FedAvg above Stand-Alone | too few seeds, -10.50 | not measured |  |\n" in text
    for (row, column), means in measured.items():
        results.add(result(table.cell(row, column).run, 3, [sum(means) / 2 - 0.1, sum(means) / 2 + 0.1]))
    text = reproduce.page.page(table, results)
    assert "```\npython examples/reproduce/run.py tiny table1 --seeds 1 2 3 --root FOLDER\n```" in text
    assert "of cells that ran 2 at a time on cpu\n" in text
    assert "| Stand-Alone | 90.00 ± 0.10 | 91.00 ± 1.00 | +1.00 | 81.0 |  | 1 | 20 | 3 |" in text
    assert "| FedAvg | 91.5 ± 1.4 | 80.50 ± 0.50 | -11.00 | 70.5 | 20.39 | 1 | 20 | 3 |" in text
    assert "| Stand-Alone | ~50 | 50.50 ± 0.50 | " in text  # client 0 alone
    assert (
        "Scored: personalized models as trained, before aggregation; on all test data for every client, under its own "
        "labels; after the last of 10 rounds x 1 local epochs; mean over clients, each counting once. "
    ) in text
    assert "\n- All: 1 orderings (open: 1)\n" in text
    titles = "| the paper's order | as trained | as aggregated | between the states |\n|---|---|---|---|\n"
    assert f"**All: 1 orderings (open: 1)**\n\n{titles}" in text
    assert "| FedAvg above Stand-Alone | reversed, -10.50, p < 0.001 | not measured |  |\n" in text
    assert "\n**Few: 1 orderings (holds as trained: 1)**\n\n**" in text  # without a table
    assert "\n- All, of FedAvg, again: 1 orderings (open: 1)\n" in text
    assert "- First: " not in text  # nothing there to compare with


def test_one_table_shows_both_states_and_counts_orders(reproduce, tiny):
    text = """
table3:
  title: Tiny
  about: Digits.
  sections: one
  columns: {All: digits, Few: [digits, data.train_fraction=0.1]}
  rows: {FedAvg: rows/averaged, Stand-Alone: rows/alone, Never: [rows/alone, model.lr=1.0]}
  printed: {FedAvg: [50, 40], Stand-Alone: [40, 50]}
"""
    table = declared(reproduce, tiny, text)
    results = reproduce.results.Results(tiny / "tiny.jsonl")
    both = {"test/acc": 0.9, "test/acc_worst10": 0.8, "test/aggregated/acc": 0.3}
    for seed in (1, 2):
        results.add(result(table.cell("FedAvg", "All").run, seed, [0.9], scores=both))
    results.add(result(table.cell("Stand-Alone", "All").run, 1, [0.8], elements=0))
    results.add(result(table.cell("Stand-Alone", "Few").run, 1, [0.5], elements=0))
    results.add(result(table.cell("FedAvg", "Few").run, 1, [0.7]))  # of which nobody scored the other state
    text = reproduce.page.page(table, results)
    assert "|  | All | Few | MB | seeds |" in text
    assert "| FedAvg | 90.0 ± 0.0 / 30.0 ± 0.0 | 70.0 /  | 1000.0 |" in text
    assert "| Stand-Alone | 80.0 / 80.0 | 50.0 / 50.0 | 0.0 | 1 |" in text
    assert "| Never" not in text
    assert "## What is printed\n\n|  | All | Few |\n| --- | --- | --- |\n| FedAvg | 50 | 40 |" in text
    assert "**All: 1 orderings (too few seeds: 1)**\n\nAs trained, in the printed order" in text
    assert "\nAs aggregated, in the printed order, if only by chance: 0.\n" in text


def test_costs_parameters_and_other_models_are_shown(reproduce, tiny):
    text = """
table2:
  title: Tiny
  about: Digits.
  sections: rows
  columns: {Cost: {run: digits, show: cost}, Size: {run: digits, show: parameters}, Acc: digits}
  rows: {FedAvg: rows/averaged, GKR: {run: rows/averaged, model: GKR}, None: {show: nothing}}
  printed: {FedAvg: [893.92, 11.17, 50], GKR: [1, 2, 3], None: [1, 2, 3]}
"""
    table = declared(reproduce, tiny, text, "middle")
    results = reproduce.results.Results(tiny / "tiny.jsonl")
    similarity = {"u": {"1": [0.9, 0.5], "4": [0.8, 0.4]}}
    results.add(result(table.cell("FedAvg", "Cost").run, 1, [0.9], "middle", similarity=similarity))
    text = reproduce.page.page(table, results)
    assert "# Tiny, at the middle scale" in text
    assert "| Cost | 893.92 | 1.000 | -892.920 |" in text
    assert "| Size | 11.17 | 2.500 | -8.670 |" in text
    assert "| Acc | 50 | 90.00 | +40.00 | 90.0 |" in text
    assert "| Acc | 3 | 50.00 | +47.00 |" in text
    assert "## None" not in text
    assert "| 4 | 0.8000 / 0.4000 |" in text
    assert "\n- Acc: 1 orderings (too few seeds: 1)\n" in text
    assert (
        "| the paper's order | outcome |\n|---|---|\n| FedAvg above GKR | too few seeds, +0.00 |" in text
    )  # of the costs


BEFORE, AFTER = "as trained", "as aggregated"


@pytest.mark.parametrize(
    ("above", "below", "outcome", "p"),
    [
        ([60, 61, 62], [50, 51.5, 51.5], "holds", 0.00083),
        ([50, 51.5, 51.5], [60, 61, 62], "reversed", 0.00083),
        ([60, 50, 61], [55, 54, 56], "undecided", 0.57),
        ([60, 61, 62, 63], [59, 60, 61, 62], "holds", None),  # the same in every seed, as of costs
        ([59, 60, 61], [60, 61, 62], "reversed", None),
        ([60, 60, 60], [60, 60, 60], "level", None),
        ([60, 61], [50, 50], "too few seeds", None),
        ([60], [50], "too few seeds", None),
        ([], [50], "not measured", None),
    ],
)
def test_an_ordering_is_judged_by_a_paired_test_over_seeds(reproduce, above, below, outcome, p):
    judgement = reproduce.judge.judge(dict(enumerate(above)), dict(enumerate(below)))
    assert judgement.outcome == outcome
    assert judgement.p == (p if p is None else pytest.approx(p, rel=0.02))


def test_only_seeds_that_both_rows_have_are_compared(reproduce):
    judgement = reproduce.judge.judge({1: 60, 2: 61, 3: 63, 9: 0}, {3: 50, 2: 50, 1: 50, 8: 99})
    assert (judgement.outcome, judgement.gap) == ("holds", pytest.approx(34 / 3))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (("holds", "holds"), "holds as trained and as aggregated"),
        (("holds", "reversed"), "holds as trained"),
        (("not measured", "holds"), "holds as aggregated"),
        (("reversed", "reversed"), "neither"),
        (("level", "reversed"), "neither"),
        (("reversed", "not measured"), "open"),
        (("reversed", "undecided"), "open"),
        (("not measured", "undecided"), "open"),
        (("too few seeds", "not measured"), "too few seeds"),
        (("too few seeds", "holds"), "holds as aggregated"),
        (("too few seeds", "reversed"), "open"),
        (("holds",), "holds"),
        (("reversed",), "reversed"),
        (("level",), "level"),
        (("undecided",), "open"),
    ],
)
def test_a_verdict_is_of_all_readings(reproduce, outcomes, expected):
    names = (BEFORE, AFTER) if len(outcomes) > 1 else ("",)
    judgements = {name: reproduce.judge.Judgement(o) for name, o in zip(names, outcomes, strict=True)}
    assert reproduce.judge.verdict(judgements) == expected


@pytest.mark.parametrize(
    ("evaluate", "other", "state"), [("before", "after", "aggregated"), ("after", "before", "trained")]
)
def test_results_of_both_states_are_judged_under_both(reproduce, tiny, evaluate, other, state):
    """FedAvg is above Stand-Alone as trained only; Stand-Alone, which sends nothing, has one state."""
    column = tiny / "papers" / "tiny" / "digits.yaml"
    column.write_text(column.read_text().replace("local_epochs: 1", f"local_epochs: 1\n  evaluate: {evaluate}"))
    table = reproduce.tables.Table(tiny / "papers" / "tiny", "table1")
    averaged, alone = (table.cell(row, "All").run for row in ("FedAvg", "Stand-Alone"))
    results = reproduce.results.Results(tiny / "tiny.jsonl")
    for seed in (1, 2, 3):
        acc = {"before": 0.9 + seed / 1000, "after": 0.7 + seed / 500}
        both = result(averaged, seed, [acc[evaluate]])
        both["scores"][f"test/{state}/acc"] = acc[other]
        both["clients"][f"{state}/personalized"] = [acc[other]]
        results.add(both)
        results.add(result(alone, seed, [0.8 - seed / 1000], elements=0))
    text = reproduce.page.page(table, results)
    assert "\n- All: 1 orderings (holds as trained: 1)\n" in text
    judged = "holds, +10.40, p < 0.001 | reversed, -9.40, p < 0.001 | +19.80, p < 0.001"
    assert f"| FedAvg above Stand-Alone | {judged} |" in text
    assert "not measured" not in text
    of_client_0 = reproduce.tables.Cell("", "", "", averaged, clients=(0,))
    assert reproduce.page._value(of_client_0, results.of(averaged, 3), f"{state}/") == pytest.approx(100 * acc[other])
    assert f"| | printed | ours | as {state} | difference |" in text
    ours = {"before": "90.20 ± 0.10", "after": "70.40 ± 0.20"}
    assert f"| FedAvg | 91.5 ± 1.4 | {ours[evaluate]} | {ours[other]} | " in text
    assert "| Stand-Alone | 90.00 ± 0.10 | 79.80 ± 0.10 | 79.80 ± 0.10 | " in text


def test_the_best_round_on_test_data_stands_beside_the_last_and_is_marked(reproduce, tiny):
    table = reproduce.tables.Table(tiny / "papers" / "tiny", "table1")
    results = reproduce.results.Results(tiny / "tiny.jsonl")
    run = table.cell("FedAvg", "All").run
    results.add(result(run, 1, [0.7], best={"test/acc": [5, 0.8]}))
    results.add(result(run, 2, [0.7], best={"test/acc": [20, 0.9]}))
    text = reproduce.page.page(table, results)
    assert "| | printed | ours | best round on test data | difference |" in text
    assert "| FedAvg | 91.5 ± 1.4 | 70.00 ± 0.00 | 85.00 ± 7.07 (5, 20) | -21.50 |" in text
    assert "\n- **best round on test data**: chosen by these data, so it is too high\n" in text


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("factorization", "threshold"),
    [
        ([], 0.0),
        (["start=dense"], 0.0),
        (["start=dense", "threshold=0.02"], 0.02),
        (["start=dense", "threshold=0.05", "below_threshold=send"], 0.05),
    ],
    ids=str,
)
def test_a_run_s_parameters_are_those_of_the_model_as_it_is_used(
    reproduce, tiny, monkeypatch, factorization, threshold
):
    """Its checkpoint has mu as it is trained; what is below the threshold does not count, of mu alone."""
    monkeypatch.chdir(tiny)
    main([
        "fit", "--model=StandAlone", "--model.backbone=MLP", *(f"--model.factorization.{f}" for f in factorization),
        "--data=Digits", "--data.num_clients=2", "--folder=run", "--trainer.max_epochs=1", "--trainer.accelerator=cpu",
        "--federation.threads=1", "--trainer.enable_progress_bar=false", "--trainer.callbacks+=Timer",
        "--trainer.callbacks.interval=step",
    ])  # fmt: skip
    run = SimpleNamespace(name="row", scale="paper", fingerprint="")
    found = reproduce.results.collect(Path("run"), run, 1, None)["parameters"]
    clients = read_checkpoint(Path("run/checkpoints/last.ckpt"))["federation"]["clients"].values()
    weights = [(name, w) for c in clients for name, w in c["state_dict"].items() if name.startswith("learner.")]
    used = [w * (w.abs() >= threshold) if name.endswith(".mu") else w for name, w in weights]
    assert found == sum(int(w.count_nonzero()) for w in used) / 2
    assert (found < sum(int(w.count_nonzero()) for _, w in weights) / 2) == bool(threshold)


@pytest.mark.seconds
def test_the_size_in_figure_8_i_follows_lambda(reproduce, printed, tmp_path):
    """With entries of mu spread as they must have been there, a normal distribution of deviation 1.86e-3."""
    table = printed["factorized_fl", "fig8i"]
    member = FactorizedFL(backbone=ResNet9).build(spec())
    torch.manual_seed(0)
    for _, layer in factorized_layers(member):
        torch.nn.init.normal_(layer.mu, std=1.86e-3)
    config = tmp_path / "config.yaml"
    for row in list(table.rows)[1:]:
        cell = table.cell(row, "Num. Params.")
        config.write_text(yaml.safe_dump(cell.run.configuration))
        threshold = reproduce.results._threshold(config)
        assert threshold == float(row.removeprefix("lambda "))
        size = reproduce.results._parameters({0: {"state_dict": member.state_dict()}}, threshold)
        assert size / 1e6 == pytest.approx(cell.number, rel=0.01)


def test_in_which_state_simfed_s_orders_hold_is_tabled_and_drawn(reproduce, printed, tmp_path):
    """FedAvg is above Stand-Alone as trained and below it as aggregated; the other cells are missing."""
    table = printed["simfed", "states"]
    assert len(table.runs(seeds=(1, 2, 3))) == 126  # Stand-Alone's are of local and of averaged statistics
    assert reproduce.states.write(table, tmp_path) is None
    results = reproduce.results.Results(tmp_path / "simfed.jsonl")
    column = "IID (P), 2 epochs, statistics averaged"
    for seed in (1, 2, 3):
        for row, trained, aggregated in (("FedAvg", 0.5, 0.3), ("Stand-Alone", 0.4, 0.4)):
            one = result(table.cell(row, column).run, seed, [trained + seed / 1000 * (row == "FedAvg")])
            one["scores"]["test/aggregated/acc"] = aggregated - seed / 900 * (row == "FedAvg")
            results.add(one)
    text = reproduce.states.write(table, tmp_path).read_text()
    assert f"| {column} | holds as aggregated (as trained -10.20, p < 0.001; as aggregated +10.22, " in text
    assert "Measured: 6 means of 96, each over 3 or more seeds." in text
    assert ".svg" not in text  # there are no lines through one number of epochs
    results.add(result(table.cell("FedAvg", column.replace("2 epochs", "5 epochs")).run, 1, [0.5]))
    assert "![Test accuracy against local epochs" in reproduce.states.write(table, tmp_path).read_text()
    assert "local epochs" in (tmp_path / "simfed_states_by_epochs_paper.svg").read_text()


# -------------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize("option", ["--at_once=0", "--at_once=-1", "--gigabytes=0"])
def test_numbers_that_make_no_sense_are_refused(reproduce, tiny, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        reproduce.run.main(arguments(tiny, option))
    assert f"{option.replace('=', ' ')}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--trainer.max_epochs=1",), ("-c", "{trainer: {max_epochs: 1}}")])
def test_options_that_would_make_another_run_are_refused(reproduce, tiny, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        reproduce.run.main(arguments(tiny, "--", *words))
    assert (
        f"-- {words[0].removesuffix('=1')} would make it another run; of these there are data"
        in capsys.readouterr().err
    )


@pytest.mark.seconds
def test_a_cell_is_printed_as_one_file_for_the_command_line(reproduce, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tiny)
    chosen = ("--scale", "middle", "--columns", "Few", "--rows", "Stand-Alone")
    assert reproduce.run.main(arguments(tiny, *chosen, "--print")) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# Tiny, Table 1: rows/alone {FEW} middle\n")
    Path("cell.yaml").write_text(text)
    main(["fit", "--config=cell.yaml", "--folder=run", "--trainer.enable_progress_bar=false"])
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (config["model"]["class_path"], config["trainer"]["max_epochs"]) == ("lit_pfl.methods.StandAlone", 2)
    assert config["data"]["init_args"]["train_fraction"] == 0.1
    assert not (tiny / "runs").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        reproduce.run.main(arguments(tiny, *chosen[:4], "--print"))
    assert "--print: these are 2 runs; choose one cell by --columns and --rows." in capsys.readouterr().err


def test_no_hours_run_nothing(reproduce, tiny, capsys):
    assert reproduce.run.main(arguments(tiny, "--scale", "middle", "--hours", "0")) == 0
    assert "cells are left" in capsys.readouterr().out
    assert not (tiny / "runs").exists()


@pytest.mark.slow
def test_a_cell_is_run_once_and_an_estimate_leaves_nothing(reproduce, tiny, capsys):
    def said(*options: str) -> str:
        only = ("--columns", "Few", "--rows", "Stand-Alone", "--seeds", "1", "--scale", "middle")
        assert reproduce.run.main(arguments(tiny, *only, *options)) == 0
        return capsys.readouterr().out

    assert re.search(rf"tiny: rows/alone {FEW} middle, seed 1: .* s a round, .* s beside, .* hours", said("--estimate"))
    assert not (tiny / "results").exists()
    assert "0 of 1 cells have a result; 1 to run" in said()
    [line] = [json.loads(line) for line in (tiny / "results" / "tiny.jsonl").read_text().splitlines()]
    assert (line["scale"], line["seed"], line["rounds"], line["elements"]) == ("middle", 1, 2, 0)
    assert line["scores"]["test/acc"] == pytest.approx(statistics.fmean(line["clients"]["personalized"]), abs=1e-6)
    assert line["seconds"] > 0
    assert not list((tiny / "runs").rglob("*.ckpt"))
    assert "1 of 1 cells have a result; 0 to run" in said()
    assert "| Stand-Alone | 64.20 ± xx.x |" in (tiny / "results" / "tiny_table1_middle.md").read_text()


def measured_of(folder: Path) -> tuple[list[dict], str]:
    """Return the results and the page, without the seconds."""
    lines = [json.loads(line) for line in (folder / "results" / "tiny.jsonl").read_text().splitlines()]
    assert all(line.pop("seconds") > 0 for line in lines)
    page = (folder / "results" / "tiny_table1.md").read_text()
    return lines, re.sub(r"\| \d+ (\| \d+ \|)$", r"\1", page, flags=re.MULTILINE)


def kill(process: subprocess.Popen, with_children: bool) -> None:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children if with_children else []:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_killed_again_and_again_gives_the_same_file(tiny):
    kills_planned = 2
    draw = random.Random(5)
    folders = (tiny / str(number) for number in itertools.count())

    def begin(folder: Path) -> subprocess.Popen:
        if not folder.exists():
            shutil.copytree(tiny / "papers", folder / "papers")
        return subprocess.Popen(command(folder, "--seeds", "1", "--columns", "Few"), stdout=subprocess.DEVNULL)

    whole, killed = next(folders), next(folders)
    began = time.monotonic()
    assert begin(whole).wait() == 0
    took, kills = time.monotonic() - began, 0
    expected = measured_of(whole)
    assert len(expected[0]) == 2
    while True:
        process = begin(killed)
        try:
            assert process.wait(None if kills == kills_planned else draw.uniform(0.05, 0.8) * took) == 0
        except subprocess.TimeoutExpired:
            kill(process, with_children=kills % 2 == 0)
            kills += 1
            continue
        assert measured_of(killed) == expected
        if kills == kills_planned:
            break
        killed = next(folders)  # all is done before the last time: again, from the beginning
