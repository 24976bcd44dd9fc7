"""Ten writers, each with a hand of their own, learn to read digits: a data set of Hugging Face, a client a writer.

The data set is made here, from the digits that come along with scikit-learn: every writer slants and thickens them
in their own way, and half of them write 1 as 7. A data set that you have loads as ever: ``load_dataset(...)``.

    python examples/writers.py
    lit-pfl fit --model FedPer --model.learner examples.writers.Reader --model.head "^head" --trainer.max_epochs 10 \\
        --data FromDataset --data.dataset examples.writers.digits --data.groups writer --data.labels digit \\
        --data.batch_size 16
"""

import logging

import lightning as L
import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import nn

from lit_pfl import Client, Federation
from lit_pfl.data import FromDataset
from lit_pfl.methods import FedAvg, FedPer, StandAlone

WRITERS = 10


def digits(samples: int = 600, seed: int = 0) -> Dataset:
    """Return the digits of all writers: columns ``image`` (8, 8), ``digit`` and ``writer``."""
    images, labels = (part[:samples] for part in load_digits(return_X_y=True))
    draw = np.random.default_rng(seed)
    writers = draw.integers(0, WRITERS, len(labels))
    rows = []
    for image, label, writer in zip(images.reshape(-1, 8, 8) / 16, labels, writers, strict=True):
        slanted = np.stack([np.roll(row, (writer % 3 - 1) * (y - 4) // 3) for y, row in enumerate(image)])
        swapped = {1: 7, 7: 1}.get(int(label), int(label)) if writer % 2 else int(label)
        rows.append({"image": slanted.astype("float32"), "digit": swapped, "writer": f"writer {writer}"})
    return Dataset.from_list(rows)


class Reader(L.LightningModule):
    """A small network for batches that are dicts."""

    def __init__(self, width: int = 64, lr: float = 0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(width, 10)
        self.lr = lr

    def forward(self, batch):
        return self.head(self.body(batch["image"]))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch), batch["digit"])

    def validation_step(self, batch, batch_idx):
        self.log("acc", (self(batch).argmax(1) == batch["digit"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def score(method: Client, rounds: int) -> float:
    trainer = L.Trainer(
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FromDataset(digits(), groups="writer", labels="digit", batch_size=16)
    trainer.fit(Federation(method, seed=1), datamodule=data)
    return float(trainer.callback_metrics["test/acc"])


def main(rounds: int = 10) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for method in (StandAlone, FedAvg, FedPer):
        torch.manual_seed(0)
        print(f"{method.__name__:10} {score(method(learner=Reader()), rounds):.1%}")


if __name__ == "__main__":
    main()
