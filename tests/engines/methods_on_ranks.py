"""Runs federations of several methods, in as many processes as its Trainers are told, and keeps what comes of them.

python methods_on_ranks.py FOLDER DEVICES METHOD [METHOD ...]
"""

import sys
from pathlib import Path
from typing import Any

import torch

import lit_pfl.methods
from lit_pfl import Client, Federation
from lit_pfl.data import Digits
from lit_pfl.engines import shared_mean
from lit_pfl.methods import Ditto, FactorizedFL, FedSLR, PsiNet, Scaffold, SimFed
from lit_pfl.models import VGG9
from lit_pfl.testing import MethodTester
from tiny import client, digits, trainer


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def small_vgg(channels: int, classes: int) -> VGG9:
    return VGG9(channels, classes, width=8, norm="batch")


#: methods with all that methods have, as they are tested on every engine
METHODS: dict[str, Any] = {
    "SimFed": lambda: client(SimFed),
    "FactorizedFL": lambda: client(FactorizedFL),
    "Scaffold": lambda: client(Scaffold, optimizer=plain_sgd, scheduler=None),
    "Ditto": lambda: client(Ditto),
    "FedSLR": lambda: client(FedSLR),
    "PsiNet": lambda: PsiNet(backbone=small_vgg),
}
#: those that are left, with a network that each can use
OTHERS: dict[str, Any] = {
    name: MethodTester(kind).method
    for name in lit_pfl.methods.__all__
    if issubclass(kind := getattr(lit_pfl.methods, name), Client) and name not in METHODS
}
ROUNDS, CLIENTS, PARTICIPATION, SEED = 4, 6, 0.5, 3


def data() -> Digits:
    return digits(CLIENTS)


def run(method: str, devices: int, **options: Any) -> Federation:
    federation = Federation((METHODS | OTHERS)[method](), seed=SEED, threads=1, participation=PARTICIPATION)
    strategy = "federated" if devices > 1 else "auto"
    trainer(ROUNDS, devices=devices, strategy=strategy, **options).fit(federation, datamodule=data())
    return federation


def outcome(federation: Federation) -> dict[str, Any]:
    """Return all that has to be the same on every engine."""
    return {
        "clients": {k: {n: t.clone() for n, t in c.state_dict().items()} for k, c in federation.clients.items()},
        "coordinator": federation.coordinator.state_dict(),
        "rows": [tuple(row) for row in federation.rows],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    shared_mean.WORTH_SHARING = shared_mean.SMALL = 0  # as if these small networks were large ones
    folder, devices, *methods = sys.argv[1:]
    for method in methods:
        federation = run(method, int(devices))
        torch.save(outcome(federation), Path(folder) / f"{method}.{federation.trainer.global_rank}")
