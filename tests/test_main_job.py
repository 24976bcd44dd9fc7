"""The README's main job in full, with the numbers that the README prints."""

from pathlib import Path

import pytest

from cli.typed import ROOT, rows
from lit_pfl.cli import main


@pytest.mark.slow
@pytest.mark.long
def test_simfed_on_digits_reaches_what_the_readme_says():
    main(["fit", "--config", str(ROOT / "configs/simfed.yaml")])
    rounds = rows(Path("runs/SimFed-Digits/version_0/metrics.csv"))
    assert len(rounds) == 30
    assert float(rounds[-1]["test/acc"]) == pytest.approx(0.962, abs=0.015)
    assert float(rounds[0]["val/acc"]) < 0.5
