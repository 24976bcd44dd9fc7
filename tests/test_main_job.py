"""The README's main job in full, with the numbers that the README prints."""

import csv
from pathlib import Path

import pytest

from lit_pfl.cli import main

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.long
def test_simfed_on_digits_reaches_what_the_readme_says():
    main(["fit", "--config", str(ROOT / "configs/simfed.yaml")])
    with Path("runs/SimFed-Digits/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30
    assert float(rows[-1]["test/acc"]) == pytest.approx(0.962, abs=0.015)
    assert float(rows[0]["val/acc"]) < 0.5
