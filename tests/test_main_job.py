"""The first ten of the thirty rounds of the README's main job."""

from pathlib import Path

import pytest

from cli.typed import ROOT, rows
from lit_pfl.cli import main

#: validation accuracy after a round, in the run of 30 that ends with the accuracy that the README prints
REACHED = {1: 0.298, 5: 0.863, 10: 0.918}


@pytest.mark.slow
@pytest.mark.long
def test_simfed_on_digits_is_on_its_way_to_what_the_readme_says():
    main(["fit", "--config", str(ROOT / "configs/simfed.yaml"), "--trainer.max_epochs=10"])
    rounds = rows(Path("runs/SimFed-Digits/version_0/metrics.csv"))
    for number, accuracy in REACHED.items():
        assert float(rounds[number - 1]["val/acc"]) == pytest.approx(accuracy, abs=0.03), f"round {number}"
