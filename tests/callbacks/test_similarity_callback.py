"""The similarity of clients, measured."""

import csv

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl import Federation
from lit_pfl.methods import FactorizedFL
from lit_pfl_callbacks import RunLogger, Similarity
from tiny import client, digits, trainer


def fit(tmp_path, rounds: int, similarity: Similarity) -> Federation:
    federation = Federation(client(FactorizedFL), seed=1, threads=1)
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(rounds, callbacks=[similarity], logger=logger).fit(federation, datamodule=digits(3))
    return federation


def test_every_pair_of_every_group_has_a_row_a_round(tmp_path):
    federation = fit(tmp_path, 3, Similarity(every_n_rounds=2))
    rows = list(csv.DictReader((tmp_path / "run" / "similarity.csv").open()))
    assert {(row["round"], row["group"]) for row in rows} == {("1", "u"), ("1", "v"), ("3", "u"), ("3", "v")}
    assert len(rows) == 2 * 2 * 3
    states = {k: c.learner.state_dict() for k, c in federation.clients.items()}
    [row] = [r for r in rows if (r["round"], r["group"], r["client"], r["other"]) == ("3", "v", "0", "2")]
    expected = torch.cosine_similarity(*(states[k]["backbone.body.0.v"].flatten() for k in (0, 2)), dim=0)
    assert float(row["cosine"]) == pytest.approx(float(expected), abs=1e-6)


def test_a_group_that_finds_nothing_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"'w': 'weihgt'.*backbone"):
        fit(tmp_path, 1, Similarity({"w": "weihgt"}))
