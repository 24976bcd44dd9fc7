"""Differential privacy of single samples: every client trains by DP-SGD, with Opacus, and FedAvg averages.

The learner is a LightningModule that makes its optimizer private: gradients are clipped sample by sample, and noise is
added to their sum. Each client counts the epsilon of its own samples. Whatever is sent of such a model is as private,
so no method has to know. `federation.privacy` is the other kind: it hides whether a client took part at all.

    pip install 'lit-pfl[privacy]'
    python examples/private_samples.py

Batches are shuffled, and counted as if every sample were drawn independently, as is common; for a guarantee to the
letter, give each client a data module of its own with Opacus's DPDataLoader. Methods that train two models by one
optimizer (Ditto, APFL) do not work with such an optimizer.
"""

import logging
import warnings

import lightning as L
import torch
from opacus.accountants import RDPAccountant
from opacus.grad_sample import GradSampleHooks
from opacus.optimizers import DPOptimizer
from torch import nn

from lit_pfl import Federation
from lit_pfl.data import Digits
from lit_pfl.methods import FedAvg

DELTA = 1e-3


class PrivateModule(L.LightningModule):
    def __init__(self, noise_multiplier=1.0, clip=1.0, batch_size=16, lr=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("acc", (self(images).argmax(1) == labels).float().mean())

    test_step = validation_step

    def configure_optimizers(self):
        options = self.hparams
        GradSampleHooks(self)  # keeps the gradient of every sample; no layer is replaced or renamed
        self.steps = 0
        private = DPOptimizer(
            torch.optim.SGD(self.parameters(), lr=options.lr),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=options.clip,
            expected_batch_size=options.batch_size,
        )
        private.attach_step_hook(self.count)
        return private

    def count(self, optimizer):
        self.steps += 1

    def epsilon(self):
        """Return what this client's samples have spent."""
        accountant = RDPAccountant()
        share = 1 / self.trainer.num_training_batches
        accountant.history = [(self.hparams.noise_multiplier, share, self.steps)]
        return accountant.get_epsilon(DELTA)


def main(rounds=10):
    """Print the accuracy and the largest epsilon of a client, for several amounts of noise."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(num_workers|Secure RNG|non-full backward hook).*")
    results = {}
    for noise in (0.5, 1.0, 2.0):
        federation = Federation(FedAvg(learner=PrivateModule(noise)), evaluate="after", seed=1)
        trainer = L.Trainer(max_epochs=rounds, logger=False, enable_checkpointing=False, accelerator="cpu")
        trainer.fit(federation, datamodule=Digits(num_clients=3, image_size=8, batch_size=16))
        spent = max(client.learner.epsilon() for client in federation.clients.values())
        results[noise] = float(trainer.callback_metrics["test/acc"]), spent
        print(f"noise {noise}: accuracy {results[noise][0]:.3f}, epsilon {spent:.2f} at delta {DELTA}")
    return results


if __name__ == "__main__":
    main()
