"""The sweep of the examples fits what can be typed."""

from pathlib import Path

import yaml

from cli.typed import ROOT, rows, typed
from wandb_files import finish

EXAMPLES = ROOT / "examples/wandb"


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
