"""The examples run, and do what they say."""

import csv
import math
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, **options):
    return runpy.run_path(str(EXAMPLES / name))["main"](**options)


def test_an_existing_project_is_federated(capsys):
    sites = run("existing_project.py", epochs=8)
    assert len(sites) == 4
    assert all(alone != together for alone, together in sites)
    assert "4 rounds" in capsys.readouterr().out


def test_a_new_method():
    assert run("new_method.py", rounds=2) > 0.1


def test_a_table(capsys):
    alone, together = run("table.py", rounds=3)
    assert together > alone > 0.7
    assert f"gain {together - alone:+.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_texts(capsys):
    alone, together = run("text.py", rounds=1)
    assert 0 < alone < 1
    assert f"FedPer: {together:.3f}, gain {together - alone:+.3f}" in capsys.readouterr().out


def test_adapters(capsys):
    for library in ("peft", "transformers"):
        pytest.importorskip(library)
    results = run("adapters.py", rounds=1, shops=2)
    sent = {name: kilobytes for name, (_, kilobytes) in results.items()}
    assert sent["alone"] == 0
    assert 0 < sent["personal adapters, common classifier"] < sent["common adapters"] < 10
    assert all(0 < accuracy <= 1 for accuracy, _ in results.values())
    assert f"{results['alone'][0]:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_private_samples(capsys):
    pytest.importorskip("opacus")
    results = run("private_samples.py", rounds=2)
    spent = [epsilon for _, epsilon in results.values()]
    assert spent == sorted(spent, reverse=True)
    assert all(0 < epsilon < math.inf for epsilon in spent)
    assert results[0.5][0] > 0.2
    assert f"epsilon {spent[0]:.2f}" in capsys.readouterr().out


def test_pictures_of_neurons(tmp_path):
    """Two nodes with two of three classes each; of the divided layer both have the group of the last class only."""
    pytest.importorskip("matplotlib")
    module = runpy.run_path(str(EXAMPLES / "neurons.py"))
    tops = {"shared": ("0 1 -1 2", "0 2 1 2"), "divided": ("0 0 2 -1", "1 1 2 2")}
    rows = [
        {"epoch": "5", "client": str(k), "position": i, "layer": layer, "total_variance": "0.5", "top_classes": own}
        for i, (layer, both) in enumerate(tops.items(), 1) for k, own in enumerate(both)
    ]  # fmt: skip
    with (tmp_path / "features.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([{**rows[0], "epoch": "1"}, *rows])
    grids = module["top_classes"](module["read"](tmp_path), 3)
    none, absent = module["NONE"], module["ABSENT"]
    assert grids["shared"].tolist() == [[0, 1, none, 2], [0, 2, 1, 2]]
    assert grids["divided"].tolist() == [[0, 0, absent, absent, 2, none], [absent, absent, 1, 1, 2, 2]]
    assert module["agreement"](grids["shared"]) == 2 / 3
    assert module["agreement"](grids["divided"]) == 1
    assert math.isnan(module["agreement"](grids["divided"][:1]))
    for name, options in (("neurons.png", {}), ("variance.svg", {"variance": True, "depth": 1})):
        module["main"](str(tmp_path / name), [f"one={tmp_path}", f"other={tmp_path}"], classes="a b c", **options)
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.slow
def test_writers(capsys):
    pytest.importorskip("datasets")
    run("writers.py", rounds=1)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["StandAlone", "FedAvg", "FedPer"]
