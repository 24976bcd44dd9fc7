"""Runs federations of several methods, every client in a process and under a Trainer of its own.

torchrun --nproc-per-node 6 methods_on_link.py FOLDER METHOD [METHOD ...]
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from lit_pfl.core import ClientSpec
from lit_pfl.lightning_internals import LateLoader
from lit_pfl.links import ProcessGroupLink
from lit_pfl.methods import Ditto, FactorizedFL, FedSLR, PsiNet, Scaffold, SimFed
from lit_pfl.models import VGG9
from lit_pfl.randomness import Draws, RandomStream
from lit_pfl_callbacks import FederatedLoop
from tiny import client, digits, trainer


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def small_vgg(channels: int, classes: int) -> VGG9:
    return VGG9(channels, classes, width=8, norm="batch")


#: methods with all that methods have
METHODS: dict[str, Any] = {
    "SimFed": lambda: client(SimFed),
    "FactorizedFL": lambda: client(FactorizedFL),
    "Scaffold": lambda: client(Scaffold, optimizer=plain_sgd, scheduler=None),
    "Ditto": lambda: client(Ditto),
    "FedSLR": lambda: client(FedSLR),
    "PsiNet": lambda: PsiNet(backbone=small_vgg),
}
ROUNDS, CLIENTS, PARTICIPATION, SEED = 4, 6, 0.5, 3


class Streams(ProcessGroupLink):
    """Gives every client the random numbers that a federation gives it."""

    def join(self, info: Any) -> Any:
        reply = super().join(info)
        self.stream = RandomStream(SEED, int(os.environ["RANK"])).active()  # active for as long as somebody holds it
        self.stream.__enter__()
        return reply


def run(method: str, rank: int) -> dict[str, Any]:
    draws, all_data = Draws(SEED), digits(CLIENTS)
    all_data.setup()
    own, prototype = all_data.client(rank), METHODS[method]()
    epochs = prototype.min_local_epochs
    with draws.default_generators("weights"):
        module = prototype.build(ClientSpec(rank, own.example, own.num_classes, own.labels_agree, epochs))
    module.data = own
    module.place_on(torch.device("cpu"))
    link = Streams(rounds=ROUNDS, participation=PARTICIPATION, seed=SEED)
    fitting = trainer(-1, callbacks=[FederatedLoop(link, epochs, num_samples=own.num_samples)])
    fitting.fit(module, LateLoader(module.training_data()))
    return {
        "clients": {rank: {name: tensor.clone() for name, tensor in module.state_dict().items()}},
        "coordinator": link.coordinator.state_dict() if rank == 0 else None,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *methods = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for method in methods:
        torch.save(run(method, rank), Path(folder) / f"{method}.{rank}")
