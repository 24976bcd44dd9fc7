"""What Windows does not have is not needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_pfl_callbacks.run_folder import read_rows

SMALL = ["--config=quick", "--data.num_clients=3", "--trainer.enable_progress_bar=false"]
RUN = "runs/Ärzte & co"  # with signs that its code page has, in another form than UTF-8


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs to see which files are open")
def test_runs_resumes_and_reports_as_on_windows(tmp_path):
    resume = [f"--config={RUN}/config.yaml", f"--ckpt_path={RUN}/checkpoints/last.ckpt"]
    commands = [
        ["fit", "--config=simfed", *SMALL, "--trainer.max_epochs=1", f"--folder={RUN}"],
        ["fit", *resume, "--trainer.max_epochs=2"],
        ["predict", *resume],
        ["fit", "--config=fedavg", *SMALL, "--trainer.max_epochs=2", "--folder=runs/b",
         "--federation.engine=Local", "--federation.engine.awake=1"],
        ["fit", "--config=runs/b/config.yaml", "--ckpt_path=runs/b/checkpoints/last.ckpt", "--trainer.max_epochs=3"],
        ["report", "runs"],
    ]  # fmt: skip
    came = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("windows.py")), *map(json.dumps, commands)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert came.returncode == 0, came.stderr
    assert [row["round"] for row in read_rows(tmp_path / RUN / "metrics.csv")] == ["1", "2"]
    assert [row["round"] for row in read_rows(tmp_path / "runs/b/metrics.csv")] == ["1", "2", "3"]
    assert read_rows(tmp_path / RUN / "predictions.csv")
    assert "Ärzte" in (tmp_path / "runs/report.html").read_text(encoding="utf-8")
