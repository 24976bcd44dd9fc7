"""Twelve clinics with few patients each, and a module of somebody's own: what each gains over training alone.

The table is scikit-learn's of breast cancer; a clinic has the patients of a range of one feature.

    python examples/table.py
    lit-pfl fit --model Ditto --model.learner examples.table.MyModule --data Table --data.num_clients 12
"""

import logging

import lightning as L
import torch
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from lit_pfl import Client, Federation
from lit_pfl.data import Table
from lit_pfl.methods import Ditto, StandAlone


class MyModule(L.LightningModule):
    def __init__(self, features: int = 30, hidden: int = 32, lr: float = 0.01):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(hidden, 1)
        self.lr = lr
        self.acc = BinaryAccuracy()

    def forward(self, rows):
        return self.head(self.body(rows)).flatten()

    def training_step(self, batch, batch_idx):
        rows, benign = batch
        return nn.functional.binary_cross_entropy_with_logits(self(rows), benign.float())

    def validation_step(self, batch, batch_idx):
        rows, benign = batch
        self.acc(self(rows), benign)
        self.log("acc", self.acc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def accuracy(client: Client, rounds: int) -> tuple[float, float]:
    """Return the test accuracy after the last round: the mean over clients, and over the worst tenth of them."""
    L.seed_everything(1)
    data = Table(
        num_clients=12, group_by="mean texture", statistics="all", train_fraction=0.3, test_fraction=0.4, batch_size=8
    )
    trainer = L.Trainer(
        max_epochs=rounds, logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu"
    )
    trainer.fit(Federation(client, local_epochs=2), datamodule=data)
    return float(trainer.callback_metrics["test/acc"]), float(trainer.callback_metrics["test/acc_worst10"])


def main(rounds: int = 10) -> tuple[float, float]:
    """Return the mean test accuracy alone and with Ditto, after printing what is gained."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    alone, worst_alone = accuracy(StandAlone(learner=MyModule()), rounds)
    together, worst_together = accuracy(Ditto(learner=MyModule()), rounds)
    print(f"accuracy, mean over clinics:        alone {alone:.3f}, Ditto {together:.3f}, gain {together - alone:+.3f}")
    gain = worst_together - worst_alone
    print(f"accuracy, worst tenth of clinics:   alone {worst_alone:.3f}, Ditto {worst_together:.3f}, gain {gain:+.3f}")
    return alone, together


if __name__ == "__main__":
    main()
