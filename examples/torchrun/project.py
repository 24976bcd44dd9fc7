"""Somebody's own Lightning project, which imports nothing of lit-pfl: how a disease goes on, at four sites."""

import lightning as L
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import R2Score

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


class MyModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
        self.r2 = R2Score()

    def training_step(self, batch, batch_idx):
        patients, progression = batch
        return nn.functional.mse_loss(self.net(patients).flatten(), progression)

    def test_step(self, batch, batch_idx):
        patients, progression = batch
        self.r2(self.net(patients).flatten(), progression)
        self.log("r2", self.r2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def my_data(site):
    """Return training and test data of one of four sites, each with patients of an age."""
    patients, progression = (torch.tensor(x).float() for x in load_diabetes(return_X_y=True))
    patients, progression = patients * 21, (progression - 150) / 75  # about 1 in size
    rows = torch.argsort(patients[:, 0], stable=True).chunk(4)[site]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(site))]
    train, test = (TensorDataset(patients[part], progression[part]) for part in (rows[:50], rows[50:]))
    return DataLoader(train, 16, shuffle=True), DataLoader(test, 128)
