"""A federation whose modules remember which rows they have trained on."""

from typing import Any

import lightning as L
import torch
from torch import nn

from lit_pfl import Federation
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks.tensors import tensors_of

ROWS = torch.arange(24.0).view(8, 3)


class Module(L.LightningModule):
    """Remembers the first number of every row that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].int().tolist()
        noisy = batch / 24 + 0.1 * torch.rand_like(batch)
        return self.head(self.body(noisy).tanh()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def federation(method: Any = FedAvg, **options: Any) -> Federation:
    torch.manual_seed(0)
    return Federation(method(learner=Module()), seed=1, **options)


def weights(federation: Federation) -> list[dict[str, torch.Tensor]]:
    return [tensors_of(client) for client in federation.clients.values()]
