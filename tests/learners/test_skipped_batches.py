"""A batch that a learner skips, since its training_step returns None, leaves no trace in any method."""

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.learners.scoring import mean_loss
from lit_pfl.methods import (
    APFL,
    AgnosticFL,
    Ditto,
    FactorizedFL,
    FedAvg,
    FedBABU,
    FedDyn,
    FedProx,
    FedSLR,
    FedSpa,
    PerFedAvg,
    PFedPara,
    Scaffold,
    SimFed,
)
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, trainer, weights


class Skips(L.LightningModule):
    """Skips what it cannot learn from."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x)).flatten()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return None if x.isnan().any() else nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


class Site(L.LightningDataModule):
    """Four batches in order; if told to, an unusable one after each of them."""

    def __init__(self, client: int, spoilt: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(client)
        self.x, self.y = torch.randn(4, 8, 10, generator=draw), torch.randn(4, 8, generator=draw)
        self.spoilt = spoilt

    def train_dataloader(self):
        x, y = self.x, self.y
        if self.spoilt:
            x = torch.stack([x, torch.full_like(x, torch.nan)], 1).flatten(0, 1)
            y = torch.stack([y, y], 1).flatten(0, 1)
        return DataLoader(TensorDataset(x.flatten(0, 1), y.flatten()), batch_size=8)


PROXIMAL = Factorization(l1=0.01, l1_mode="proximal")
METHODS = {
    "FedAvg": lambda **options: FedAvg(**options),
    "proximal steps": lambda **options: FedAvg(factorization=PROXIMAL, **options),
    "FedProx": lambda **options: FedProx(mu=0.1, **options),
    "Ditto, one after the other": lambda **options: Ditto(schedule="separate", **options),
    "FedSpa": lambda **options: FedSpa(**options),
    "Scaffold": lambda **options: Scaffold(**options),
    "FedDyn": lambda **options: FedDyn(alpha=0.1, **options),
    "AgnosticFL": lambda **options: AgnosticFL(**options),
    "Ditto": lambda **options: Ditto(**options),
    "APFL": lambda **options: APFL(adaptive=True, **options),
    "FactorizedFL": lambda **options: FactorizedFL(**options),
    "PFedPara": lambda **options: PFedPara(**options),
    "FedSLR": lambda **options: FedSLR(**options),
    "FedSLR, LPGD": lambda **options: FedSLR(solver="LPGD", lam=0.01, **options),
}


def run(method, spoilt, **options):
    torch.manual_seed(0)
    federation = Federation(method(learner=Skips()), seed=1, threads=1, local_epochs=2, **options)
    trainer(3).fit(federation, datamodule=PerClient([Site(client, spoilt) for client in range(2)]))
    return federation


@pytest.mark.few(4)
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_skipped_batches_leave_no_trace(method, lean):
    options = {} if lean else {"client_trainer": {"callbacks": [L.Callback()]}}
    plain, spoilt = (run(method, spoilt, **options) for spoilt in (False, True))
    assert_equal(weights(plain), weights(spoilt))
    assert plain.trainer.callback_metrics["train/loss"] == spoilt.trainer.callback_metrics["train/loss"]


class Poisson(Site):
    """Every other batch has drawn nobody, as Poisson sampling may."""

    def train_dataloader(self):
        batches = [batch for i in range(4) for batch in (range(8 * i, 8 * i + 8), range(0))]
        nobody = [torch.zeros(0, 10), torch.zeros(0)]
        return DataLoader(
            TensorDataset(self.x.flatten(0, 1), self.y.flatten()),
            batch_sampler=batches,
            collate_fn=lambda rows: default_collate(rows) if rows else nobody,
        )


def test_batches_of_nobody_do_not_count_in_the_loss():
    federation = Federation(FedAvg(learner=Skips()), seed=1, threads=1)
    trainer(2).fit(federation, datamodule=PerClient([Poisson(client, False) for client in range(2)]))
    assert math.isfinite(federation.trainer.callback_metrics["train/loss"])
    learner, (nobody, batch) = federation.clients[0].learner, [(torch.ones(n, 10), torch.ones(n)) for n in (0, 4)]
    assert mean_loss(learner, [nobody, batch]) == mean_loss(learner, [batch])


class Dropping(Site):
    """Every other batch is None: its collate_fn has dropped all of its samples."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.collate_fn = usable
        return loader


def usable(rows):
    rows = [row for row in rows if not row[0].isnan().any()]
    return default_collate(rows) if rows else None


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, Ditto, PerFedAvg, FedBABU, SimFed], ids=lambda method: method.__name__)
def test_batches_that_are_none_are_left_out(method):
    federations = []
    for kind, spoilt in ((Site, False), (Dropping, True)):
        torch.manual_seed(0)
        federation = Federation(method(learner=Skips()), seed=1, threads=1)
        trainer(2).fit(federation, datamodule=PerClient([kind(client, spoilt) for client in range(2)]))
        federations.append(federation)
    plain, dropping = federations
    if method is FedAvg:  # others read twice as many samples, or divide other batches
        assert_equal(weights(plain), weights(dropping))
    assert math.isfinite(dropping.trainer.callback_metrics["train/loss"])
    with dropping.clients[0].personalized() as one:
        assert all(weight.isfinite().all() for weight in one.state_dict().values())


@pytest.mark.seconds
def test_the_inner_step_of_per_fedavg_is_of_the_batches_that_are_left():
    plain, spoilt = (run(PerFedAvg, spoilt).clients[0] for spoilt in (False, True))
    plain.load_state_dict(spoilt.state_dict())
    with plain.personalized() as one, spoilt.personalized() as other:
        for name, weight in one.state_dict().items():
            torch.testing.assert_close(weight, other.state_dict()[name])
            assert not torch.equal(weight, torch.zeros_like(weight))
