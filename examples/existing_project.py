"""An existing Lightning project becomes a federation of four, by one callback.

Everything above the line is somebody's own project and imports nothing of lit-pfl. Here all four sites live in one
process; between processes or hospitals the callback is the same and only its link differs.

    python examples/existing_project.py
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional import accuracy


class MyModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("acc", accuracy(self.net(images), labels, "multiclass", num_classes=10))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def my_data():
    images, labels = load_digits(return_X_y=True)
    everything = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    return random_split(everything, [60, 60, 60, 60, len(everything) - 240], torch.Generator().manual_seed(0))


# ----------------------------------------------------------------------------------------------------------------------

from lit_pfl import Server
from lit_pfl.links import LocalHub
from lit_pfl_callbacks import FederatedLoop


def main(epochs: int = 20) -> list[float]:
    *sites, test = my_data()
    hub, modules = LocalHub(seed=1), [MyModule() for _ in sites]
    for site, (module, data) in enumerate(zip(modules, sites, strict=True)):
        callback = FederatedLoop(hub.link, every_n_epochs=2)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}  # four share a screen
        trainer = L.Trainer(max_epochs=epochs, callbacks=[callback], **quiet)
        hub.add(site, lambda t=trainer, m=module, x=DataLoader(data, 16, shuffle=True): t.fit(m, x))
    coordinator = hub.run(Server())
    print(f"{coordinator.round} rounds, {coordinator.ledger.total / 1e6:.2f} MB sent")
    tester = L.Trainer(logger=False, enable_progress_bar=False)
    return [tester.validate(module, DataLoader(test, 500), verbose=False)[0]["acc"] for module in modules]


if __name__ == "__main__":
    print("accuracy at each site:", main())
