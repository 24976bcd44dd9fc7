"""Federations over data of every kind: learners that nobody wrote for them, resumed bit for bit, in any order."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import R2Score

from lit_pfl import Federation
from lit_pfl.data import Dirichlet, FromDataset, PerClient, Table, Text
from lit_pfl.errors import ConfigError
from lit_pfl.methods import Ditto, FedAvg, Scaffold
from tiny import assert_equal, client, run, trainer, weights


class Linear(L.LightningModule):
    """A linear model of flat inputs with dropout, for numbers or classes."""

    momentum = 0.9

    def __init__(self, features: int, outputs: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.1), nn.Linear(features, outputs))
        self.r2 = R2Score()

    def loss(self, x, y):
        out = self.net(x.flatten(1))
        return nn.functional.cross_entropy(out, y) if y.dtype == torch.int64 else nn.functional.mse_loss(out[:, 0], y)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(x, y))
        if y.dtype != torch.int64:
            self.r2(self.net(x)[:, 0], y)
            self.log("val_r2", self.r2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


class Noisy(Dataset):
    """Samples that are drawn anew every time, from two of the generators."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i):
        return torch.randn(3) + i % 2 + random.random(), i % 2


class Site(L.LightningDataModule):
    """Somebody's data module."""

    def __init__(self, site: int) -> None:
        super().__init__()
        self.site = site

    def setup(self, stage):
        x = torch.randn(30, 4, generator=torch.Generator().manual_seed(self.site))
        self.train, self.val = (
            TensorDataset(x[:21], x[:21, 0] * self.site),
            TensorDataset(x[21:], x[21:, 0] * self.site),
        )

    def train_dataloader(self):
        return DataLoader(self.train, 5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 5)


def text():
    return Text(window=12, batch_size=64, source=["a.txt", "b.txt", "c.txt"])


def masks():
    images = torch.rand(40, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    return FromDataset(TensorDataset(images, (images[:, 0, 0, 0] > 0.5).long()), num_clients=3, batch_size=8)


class Reader(LightningTransformer):
    """Lightning's own, smaller and without its download."""

    def __init__(self) -> None:
        super().__init__(vocab_size=27)
        self.model = type(self.model)(vocab_size=27, ninp=8, nhead=2, nhid=8, nlayers=1)

    def prepare_data(self):
        pass


KINDS = {
    "a table to regress": (lambda: Table("diabetes", num_clients=3), lambda: Linear(10)),
    "a table by ages": (lambda: Table("diabetes", group_by="age", num_clients=3), lambda: Linear(10)),
    "a table of classes": (lambda: Table("wine", partition=Dirichlet(0.5), num_clients=3), lambda: Linear(13, 3)),
    "held samples": (masks, lambda: Linear(9, 2)),
    "samples read anew": (
        lambda: FromDataset(Noisy(), groups=[i % 3 for i in range(60)], batch_size=5),
        lambda: Linear(3, 2),
    ),
    "a data module a client": (lambda: PerClient(Site, num_clients=3), lambda: Linear(4)),
    "text": (text, Reader),
}
ALL = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _texts(tmp_path):
    for i, name in enumerate("abc"):
        letters = random.Random(i).choices("abcdefghijklmnopqrstuvwxyz ", k=1500)
        (tmp_path / f"{name}.txt").write_text("abcdefghijklmnopqrstuvwxyz " + "".join(letters))


def fit(kind, method=FedAvg, rounds=2, data=None, path=None, save=None) -> Federation:
    make_data, make_learner = KINDS[kind]
    torch.manual_seed(1)
    learner = make_learner()
    learner.momentum = 0.0 if method is Scaffold else 0.9
    federation = Federation(method(learner=learner), seed=3, threads=1)
    fitting = trainer(rounds)
    fitting.fit(federation, datamodule=data or make_data(), ckpt_path=path)
    if save:
        fitting.save_checkpoint(save)
    return federation


@pytest.mark.few(8)
@ALL
@pytest.mark.parametrize("method", [FedAvg, Scaffold, Ditto])
def test_every_kind_of_data_trains(kind, method):
    federation = fit(kind, method)
    assert len(federation.clients) == 3
    before = KINDS[kind][1]()
    assert any(
        not torch.equal(a, b)
        for a, b in zip(federation.clients[0].learner.parameters(), before.parameters(), strict=True)
    )
    scored = [row for row in federation.rows if row.n]
    assert len(scored) == (0 if kind == "a data module a client" else 3)  # which has no test data
    assert all(torch.isfinite(torch.tensor(list(row.scores.values()))).all() for row in scored)


@ALL
def test_a_resumed_federation_is_the_same(kind, tmp_path):
    whole = fit(kind)
    fit(kind, rounds=1, save=tmp_path / "half.ckpt")
    torch.manual_seed(99)
    random.seed(99)
    resumed = fit(kind, path=tmp_path / "half.ckpt")
    assert_equal(weights(whole), weights(resumed))
    assert whole.rows == resumed.rows


@ALL
def test_the_order_of_clients_does_not_matter(kind):
    def backwards():
        data = KINDS[kind][0]()
        sets = data.train_dataloader

        def reversed_sets():
            made = sets()
            choose = made.choose
            made.choose = lambda completed: list(reversed(choose(completed)))
            made.set_epoch(0)
            return made

        data.train_dataloader = reversed_sets
        return data

    assert_equal(weights(fit(kind)), weights(fit(kind, data=backwards())))


@ALL
def test_the_built_in_classifier_says_what_it_needs(kind):
    data = KINDS[kind][0]()
    if kind == "held samples":  # images and classes, but for their number
        data = FromDataset(TensorDataset(torch.rand(30, 1, 3, 3), torch.zeros(30).long()), num_clients=3)
    with pytest.raises(ConfigError, match="model.learner: without one, clients classify images"):
        trainer(1).fit(Federation(FedAvg()), datamodule=data)


def test_the_built_in_classifier_takes_the_numbers_of_numpy():
    """Images of 64 bits, and labels of other whole types, as it does those of PyTorch."""
    images, labels = np.random.rand(60, 1, 8, 8).astype(np.float32), np.arange(60) % 3  # noqa: NPY002
    found = []
    for x, y in ((images, labels), (images.astype(np.float64), labels.astype(np.int32))):
        samples = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        found.append(run(client(FedAvg), FromDataset(samples, labels=labels, num_clients=2)))
    assert_equal(weights(found[1]), weights(found[0]), "weights")
    assert found[1].rows == found[0].rows


def test_the_built_in_classifier_takes_any_dataset_of_images():
    from tiny import client

    images = TensorDataset(torch.rand(60, 1, 8, 8), torch.arange(60) % 3)
    data = FromDataset(images, Dirichlet(5.0), labels=lambda sample: int(sample[1]), num_clients=3, permute_labels=True)
    federation = run(client(FedAvg), data, rounds=1, seed=1)
    assert federation.clients[0].backbone.head.out_features == 3
    assert {row.n for row in federation.rows} <= set(range(1, 7))
