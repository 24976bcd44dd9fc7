"""An existing Lightning project becomes a federation of four sites, by two changed lines on each.

Everything above the line is somebody's own project and imports nothing of lit-pfl: it foretells how a disease goes on
(a number, not a class). Here all four sites live in one process; between processes or hospitals the two lines are the
same, and only the callback's link differs.

    python examples/existing_project.py
"""

import logging
from functools import partial
from statistics import fmean

import lightning as L
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import R2Score


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


def my_data():
    """Return training and test data of four sites, each with patients of an age."""
    patients, progression = (torch.tensor(x).float() for x in load_diabetes(return_X_y=True))
    patients, progression = patients * 21, (progression - 150) / 75  # about 1 in size
    generator, sites = torch.Generator().manual_seed(0), []
    for rows in torch.argsort(patients[:, 0], stable=True).chunk(4):
        rows = rows[torch.randperm(len(rows), generator=generator)]
        sites.append([TensorDataset(patients[part], progression[part]) for part in (rows[:50], rows[50:])])
    return sites


def my_trainer(epochs, *callbacks):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=False, **quiet
    )


def before(train, test, epochs):
    module = MyModule()
    trainer = my_trainer(epochs)
    trainer.fit(module, DataLoader(train, 16, shuffle=True))
    return trainer.test(module, DataLoader(test, 128), verbose=False)[0]["r2"]


# ----------------------------------------------------------------------------------------------------------------------

from lit_pfl.links import LocalHub
from lit_pfl.methods import Ditto
from lit_pfl_callbacks import FederatedLoop


def after(train, test, epochs, link):
    module = Ditto(learner=MyModule())  # before: MyModule()
    trainer = my_trainer(epochs, FederatedLoop(link, every_n_epochs=2))  # before: my_trainer(epochs)
    trainer.fit(module, DataLoader(train, 16, shuffle=True))
    return trainer.test(module, DataLoader(test, 128), verbose=False)[0]["r2"]


def main(epochs: int = 40) -> list[tuple[float, float]]:
    """Return R2 on the test data of every site: alone, and in the federation."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(1)
    sites, hub, together = my_data(), LocalHub(seed=1), {}
    alone = [before(train, test, epochs) for train, test in sites]

    def run(site: int) -> None:
        together[site] = after(*sites[site], epochs, hub.link)

    for site in range(len(sites)):
        hub.add(site, partial(run, site))
    coordinator = hub.run()

    print(f"{coordinator.round} rounds, {coordinator.ledger.total / 1e6:.2f} MB sent")
    for site, r2 in enumerate(alone):
        print(f"site {site}: R2 alone {r2:.3f}, together {together[site]:.3f}, gain {together[site] - r2:+.3f}")
    print(f"mean gain {fmean(together[site] - r2 for site, r2 in enumerate(alone)):+.3f}")
    return [(r2, together[site]) for site, r2 in enumerate(alone)]


if __name__ == "__main__":
    main()
