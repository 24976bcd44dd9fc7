"""Fourteen authors with a short text each, who learn which character comes next: what each gains over writing alone.

The texts are those that describe scikit-learn's data sets. FedPer's clients have an embedding and a recurrent layer in
common, and an output layer of their own; with FedAvg they have all of it in common.

    python examples/text.py
    lit-pfl fit --model FedPer --model.learner examples.text.MyModule --data Text --trainer.max_epochs 5
"""

import logging
from pathlib import Path

import lightning as L
import sklearn.datasets
import torch
from torch import nn

from lit_pfl import Client, Federation
from lit_pfl.data import Text
from lit_pfl.methods import FedAvg, FedPer, StandAlone


class MyModule(L.LightningModule):
    def __init__(self, vocabulary: int = 128, width: int = 64, lr: float = 0.01):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.body = nn.GRU(32, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.lr = lr

    def forward(self, characters):
        states, _ = self.body(self.embedding(characters))
        return self.head(states).transpose(1, 2)  # (B, vocabulary, T)

    def training_step(self, batch, batch_idx):
        characters, following = batch
        return nn.functional.cross_entropy(self(characters), following)

    def validation_step(self, batch, batch_idx):
        characters, following = batch
        logits = self(characters)
        self.log("loss", nn.functional.cross_entropy(logits, following))
        self.log("acc", (logits.argmax(1) == following).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def accuracy(client: Client, rounds: int) -> float:
    """Return the mean over clients of the share of characters foretold, in test texts after the last round."""
    L.seed_everything(1)
    folder = Path(sklearn.datasets.__file__).parent / "descr"
    data = Text(str(folder), files="*.rst", window=32, batch_size=16)
    trainer = L.Trainer(
        max_epochs=rounds, logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu"
    )
    trainer.fit(Federation(client), datamodule=data)
    return float(trainer.callback_metrics["test/acc"])


def main(rounds: int = 10) -> tuple[float, float]:
    """Return the accuracy alone and with FedPer, after printing what is gained."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    alone = accuracy(StandAlone(learner=MyModule()), rounds)
    print(f"share of characters foretold, alone: {alone:.3f}")
    gained = {}
    for method in (FedPer, FedAvg):
        gained[method] = accuracy(method(learner=MyModule()), rounds) - alone
        print(
            f"share of characters foretold, {method.__name__}: {alone + gained[method]:.3f}, gain {gained[method]:+.3f}"
        )
    return alone, alone + gained[FedPer]


if __name__ == "__main__":
    main()
