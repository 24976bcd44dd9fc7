"""With what it adds switched off by its options, a method is another one, bit for bit."""

from typing import Any

import pytest
from heads import Uniform, skewed

from lit_pfl import Client
from lit_pfl import methods as M
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, run, weights

FACTORS, AVERAGED = Factorization(form="FFxIO", l1=1e-3), {"norm_stats": "averaged"}
PART, AFTER, PERMUTED = {"participation": 0.5}, {"evaluate": "after"}, {"permute_labels": True}
#: what may be the same besides the weights
SAME = {
    "scores": lambda federation: [tuple(row) for row in federation.rows],
    "server": lambda federation: federation.coordinator.state_dict(),
    "traffic": lambda federation: federation.traffic.state_dict(),
}
#: a method and its options, the other one and its options, options of data and federation, what else is the same
CASES: list[tuple[type[Client], dict[str, Any], type[Client], dict[str, Any], dict[str, Any], str]] = [
    (M.FD, {"lam": 0.0}, M.StandAlone, {}, {}, ""),
    (M.FactorizedFL, {"match": "none", "mixes": "u", "factorization": FACTORS},
     M.StandAlone, {"factorization": FACTORS}, {}, ""),
    (M.FactorizedFL, {"match": "none", "mixes": "uvm", "factorization": FACTORS},
     M.StandAlone, {"factorization": FACTORS}, {}, ""),
    (M.FactorizedFL, {"tau": 1.1, "mixes": "u", "factorization": FACTORS},
     M.StandAlone, {"factorization": FACTORS}, {}, ""),
    (M.FactorizedFL, {"tau": 1.1, "mixes": "uvm", "factorization": FACTORS},
     M.StandAlone, {"factorization": FACTORS}, {}, ""),
    (M.FedALA, {"eta": 0.0}, M.FedAvg, {}, AFTER, ""),
    (M.FedAMP, {"lam": 0.0}, M.StandAlone, {}, PART, ""),
    (M.FedAvgM, {"momentum": 0.0, **AVERAGED}, M.FedAvg, AVERAGED, {}, "traffic"),
    (M.FedBN, {"weighting": "samples"}, M.FedAvg, {"local": "norm"}, {}, "traffic"),
    (M.FedCAC, {"tau": 0.0}, M.FedAvg, {}, {}, ""),
    (M.FedEM, {"components": 1}, M.FedAvg, {}, {}, ""),
    (M.FedGen, {"alpha": 0.0, "beta": 0.0}, M.FedAvg, {}, {}, ""),
    (M.FedLC, {"tau": 0.0}, M.FedAvg, {}, {}, "server"),
    (M.FedNTD, {"beta": 0.0}, M.FedAvg, {}, {}, ""),
    (M.FedPer, {"personal_layers": 0}, M.FedAvg, {}, {}, "scores"),
    (M.FedPer, {"personal_layers": 2}, M.StandAlone, {}, {}, ""),
    # which is why SimFed's table by local epochs has no rows of FedPer (configs/paper/simfed/tables.yaml)
    (M.FedPer, {}, M.FedAvg, {}, PERMUTED, "scores"),
    (M.FedPer, AVERAGED, M.FedAvg, AVERAGED, PERMUTED, "scores"),
    (M.FedProto, {"lam": 0.0, "scored": "classifier"}, M.StandAlone, {}, {}, "scores"),
    (M.FedProx, {"mu": 0.0}, M.FedAvg, {}, {}, "server"),
    (M.FedRS, {"alpha": 1.0}, M.FedAvg, {}, {}, "server"),
    (M.FedRep, {"mode": "joint"}, M.FedPer, {}, {}, "scores traffic"),
    (M.FedRep, {"mode": "joint"}, M.FedPer, {}, PERMUTED, "scores traffic"),
    (M.FedRoD, {"gamma": 0.0, "start": "zero"}, M.FedAvg, {}, {}, "server"),
    (M.FedRoD, {"gamma": 0.0, "start": "copy"}, M.FedAvg, {}, {}, "server"),
    (M.HeurFedAMP, {"lam": 0.0}, M.StandAlone, {}, PART, ""),
    (M.KNNPer, {"lam": 0.0}, M.FedAvg, {}, {}, "scores"),
    (M.KNNPer, {}, M.FedAvg, {}, {}, ""),
    (M.L2GD, {"mix": 0.0}, M.StandAlone, {}, PART, ""),
    (M.L2GD, {"mix": 0.0, "factorization": FACTORS}, M.StandAlone, {"factorization": FACTORS}, PART, ""),
    (M.L2GD, {"mix": 1.0}, Uniform, {}, PART, ""),
    (M.L2GD, {"mix": 1.0, "factorization": FACTORS, **AVERAGED},
     Uniform, {"factorization": FACTORS, **AVERAGED}, PART, ""),
    (M.LGFedAvg, {"shared_layers": 2, "weighting": "samples"}, M.FedAvg, {}, {}, ""),
    (M.LGFedAvg, {}, M.StandAlone, {}, PERMUTED, "scores"),
    (M.MOON, {"mu": 0.0}, M.FedAvg, {}, {}, "server"),
    (M.PFedSim, {"warmup_rounds": 3}, M.FedAvg, {}, {}, ""),
    (M.SimFed, {"tau": 1.1}, M.StandAlone, {"factorization": Factorization()}, {}, ""),
    (M.SimFed, {"tau": 0.0}, M.StandAlone, {"factorization": Factorization()}, {"num_clients": 1}, ""),
]  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("method", "options", "other", "its_options", "settings", "same"),
    CASES,
    ids=["-".join([method.__name__, *options, *settings]) for method, options, _, _, settings, _ in CASES],
)
def test_it_is_another_method(method, options, other, its_options, settings, same):
    data = {name: settings[name] for name in ("permute_labels", "num_clients") if name in settings}
    how = {name: value for name, value in settings.items() if name not in data}
    ours, theirs = (
        run(client(kind, **given), skewed(**data), rounds=3, local_epochs=2, **how)
        for kind, given in ((method, options), (other, its_options))
    )
    for k, state in weights(theirs).items():
        assert_equal({name: weights(ours)[k][name] for name in state}, state)
    for what in same.split():
        assert_equal(SAME[what](ours), SAME[what](theirs), what)
