"""Resuming, and rounds without a client, by options that methods' own configurations do not have."""

from functools import partial

import pytest
import torch

from lit_pfl.core import ServerAdam
from lit_pfl.methods import (
    APFL,
    ClusteredFL,
    Ditto,
    FactorizedFL,
    FedADMM,
    FedAvg,
    FedDyn,
    FedFOMO,
    FedSLR,
    FedSpa,
    PerFedAvg,
    PFedMe,
    PFedSim,
)
from lit_pfl.nn.factorization import Factorization
from lit_pfl.testing import MethodTester
from lit_pfl.testing.methods import clients_that_do_not_take_part_stay_as_they_are, resumed_equals_uninterrupted
from tiny import client

SMALL_ENTRIES = {
    "mixes": "uvm", "tau": -1.0,
    "factorization": Factorization(form="FFxIO", l1=1e-3, threshold=0.06, below_threshold="keep"),
}  # fmt: skip
PLAIN_SGD = {"optimizer": partial(torch.optim.SGD, lr=0.01), "scheduler": None}
CASES = [
    (APFL, {"adaptive": True}),
    (APFL, {"adaptive": True, "mixing": "parameters"}),
    (ClusteredFL, {"start_round": 0, "eps1": 9.0, "eps2": 0.1, "min_size": 2}),
    (Ditto, {"schedule": "separate"}),
    (FactorizedFL, SMALL_ENTRIES),
    (FedAvg, {"server_optimizer": ServerAdam()}),
    (FedADMM, {"start": "own"}),
    (FedADMM, {"start": "global"}),
    (FedDyn, {"by_samples": True}),
    (FedFOMO, {"num_models": 2}),
    (FedSLR, {"lam": 0.01}),
    (FedSLR, {"lam": 0.01, "server_memory": "each"}),
    (FedSLR, {"lam": 0.1, "solver": "LPGD"}),
    (FedSLR, {"lam": 1e-3, "common": "sparse"}),
    (FedSpa, {"rounds": 4, "regrow": "gradient"}),
    (FedSpa, {"rounds": 4, "regrow": "none"}),
    (PFedMe, {"beta": 0.5, "inner_lr": 0.01, **PLAIN_SGD}),
    (PFedSim, {"warmup_rounds": 1}),
    (PerFedAvg, {"order": "first"}),
    (PerFedAvg, {"order": "hessian_free"}),
    (PerFedAvg, {"order": "exact"}),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "check", [resumed_equals_uninterrupted, clients_that_do_not_take_part_stay_as_they_are], ids=lambda c: c.__name__
)
@pytest.mark.parametrize(("method", "options"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_by_other_options(method, options, check):
    check(MethodTester(partial(client, method, **options)))
