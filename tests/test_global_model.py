"""The one model of all, scored on everybody's data at once."""

import pytest
import torch
from torch import nn

from cli.typed import rows
from lit_pfl import Federation
from lit_pfl.data import ClassShards
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedMA, FedPer, FedProx, PsiNet, SimFed, StandAlone
from lit_pfl.testing.method_tester import PlainNet
from lit_pfl_callbacks import ClientsTable, RunLogger
from tiny import client, digits, run, trainer

GLOBAL = {"evaluate": "global"}


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, FedProx])
def test_it_is_what_every_client_gets_after_aggregation(method):
    made = client(method, norm_stats="averaged")
    everybody = run(made, digits(3, evaluate_on="all"), evaluate="after")
    one = run(made, digits(3, evaluate_on="all"), **GLOBAL)
    [row] = one.rows
    assert (row.client, row.round, row.split, row.model, row.n) == (-1, 2, "test", "global", 180)
    assert [r.scores for r in everybody.rows] == [row.scores] * 3


@pytest.mark.seconds
def test_it_is_scored_on_all_data_although_clients_have_parts():
    [row] = run(client(FedAvg, norm_stats="averaged"), digits(5, partition=ClassShards(2)), **GLOBAL).rows
    assert row.n == 180


@pytest.mark.seconds
def test_scoring_it_changes_nothing():
    made = client(FedAvg, norm_stats="averaged")
    states = [run(made, digits(3), **options).clients[1].state_dict() for options in ({}, GLOBAL)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_fedma_has_one_when_all_its_layers_are_done():
    def layers(network: nn.Module) -> int:
        return len([m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)])

    made = client(FedMA, backbone=PlainNet, scheduler=None)
    depth = layers(PlainNet(1, 10))
    for rounds, scores in ((depth - 1, 0), (depth, 1), (depth + 1, 1)):
        federation = run(made, digits(2, evaluate_on="all"), rounds=rounds, **GLOBAL)
        assert len(federation.rows) == scores
    whole = run(made, digits(2, evaluate_on="all"), rounds=depth, evaluate="after")
    assert whole.rows[0].scores["acc"] == federation.rows[0].scores["acc"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (client(SimFed), "SimFed has no global model"),
        (client(StandAlone), "StandAlone has no global model"),
        (client(FedPer, norm_stats="averaged"), "with FedPer .*'backbone.head.weight'"),
        (client(FedAvg), "with FedAvg .*running_mean.*set model.norm_stats=averaged"),
    ],
)
def test_methods_without_one_are_refused(method, words):
    with pytest.raises(
        ConfigError, match=rf"federation.evaluate=global: .*{words}|federation.evaluate=global: {words}"
    ):
        run(method, digits(2), **GLOBAL)


@pytest.mark.seconds
def test_without_validation_data_test_data_are_scored_every_round(tmp_path):
    data = digits(3, train_fraction=0.4, test_fraction=0.6)
    logger = RunLogger(str(tmp_path), name="", version="run")
    federation = Federation(client(PsiNet), seed=1, threads=1, **GLOBAL)
    trainer(3, logger=logger, callbacks=[ClientsTable(show=False)]).fit(federation, datamodule=data)
    rounds, scored = rows(tmp_path / "run/metrics.csv"), rows(tmp_path / "run/clients.csv")
    assert "val/acc" not in rounds[0]
    assert [row["round"] for row in rounds if float(row["test/acc"]) >= 0] == ["1", "2", "3"]
    others = [row for row in scored if row["state"] != "global"]  # of the last round
    assert [(row["client"], row["round"], row["state"]) for row in others] == [
        (client, "3", state) for client in "012" for state in ("trained", "aggregated")
    ]
    scored = [row for row in scored if row not in others]
    assert [(row["client"], row["round"], row["split"]) for row in scored] == [("-1", n, "test") for n in "123"]
    assert [float(row["acc"]) for row in scored] == [float(row["test/acc"]) for row in rounds]
