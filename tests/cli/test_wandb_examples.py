"""The sweep of the examples fits what can be typed, and the workspace what is logged."""

import runpy
from pathlib import Path

import pytest
import yaml

from cli.typed import ROOT, TINY, rows, typed
from wandb_files import finish, wandb_history

EXAMPLES = ROOT / "examples/wandb"


@pytest.mark.slow
def test_the_sweep_types_what_the_command_line_takes(capsys):
    """As W&B's agent does: every parameter becomes an option."""
    sweep = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    assert sweep["metric"]["goal"] == "maximize"
    values = {name: (choice.get("values") or [choice["min"]])[0] for name, choice in sweep["parameters"].items()}
    chosen = [f"--{name}={value}" for name, value in values.items()]
    program, *words = [word for part in sweep["command"] for word in (chosen if part == "${args}" else [part])]
    assert program == "lit-pfl"
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    small = ["--data.num_clients", "2", "--trainer.max_epochs", "1", "--federation.local_epochs", "1"]
    assert typed(capsys, *words, *small).code == 0
    finish()
    [folder] = Path("runs/SimFed-Digits").iterdir()
    assert sweep["metric"]["name"] in rows(folder / "metrics.csv")[0]
    options = yaml.safe_load((folder / "config.yaml").read_text())
    assert (options["model"]["init_args"]["tau"], options["model"]["init_args"]["alpha"]) == (0.0, 0.5)


def test_the_workspace_shows_what_a_run_logs(capsys):
    pytest.importorskip("wandb_workspaces")
    code = runpy.run_path(str(EXAMPLES / "workspace.py"))
    made = code["workspace"]("somebody", "lit-pfl")
    assert (made.entity, made.project, made.settings.x_axis) == ("somebody", "lit-pfl", "round")
    assert [section.name for section in made.sections] == [*code["LINES"], *code["MEDIA"], "What differs"]
    plots = [panel for section in made.sections for panel in section.panels if hasattr(panel, "x")]
    assert {panel.x for panel in plots} == {"round", "comm/total_bytes"}
    shown = {name for panel in plots for name in panel.y} | {name for names in code["MEDIA"].values() for name in names}
    shown.add(code["EMBEDDINGS"])
    assert typed(capsys, "fit", *TINY, "--config", str(ROOT / "configs/logger/wandb.yaml")).code == 0
    finish()
    [run] = Path("runs/wandb").glob("offline-run-*/*.wandb")
    logged = {name for row in wandb_history(run)[0] for name in row}
    assert shown - logged <= {"similarity/parameters"}, "which a factorized method has as u and v"
