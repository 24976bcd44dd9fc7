"""The examples run, and do what they say."""

import runpy
from pathlib import Path

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


def test_texts(capsys):
    alone, together = run("text.py", rounds=1)
    assert 0 < alone < 1
    assert f"FedPer: {together:.3f}, gain {together - alone:+.3f}" in capsys.readouterr().out
