"""Learning rates that follow a client's own epochs, or the federation's rounds."""

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import FederatedLoop
from tiny import client, digits, trainer

GAMMA = 0.9


def decaying(optimizer):
    return ExponentialLR(optimizer, GAMMA)


def rates(counts, rounds=6, fits=1, decays=decaying, **options):
    """Return (client, round, epoch, learning rate) of every local epoch."""
    seen = []

    class Noting(FedAvg):
        def begin_epoch(self, epoch, local_epochs):
            [optimizer] = self.trainer.optimizers
            seen.append((self.spec.client_id, self.completed_rounds + 1, epoch, optimizer.param_groups[0]["lr"]))

    method = client(Noting, scheduler=decays, scheduler_counts=counts)
    federation = Federation(method, seed=3, threads=1, local_epochs=2, **options)
    fitting = trainer(rounds // fits)
    for fit in range(1, fits + 1):
        fitting.fit_loop.max_epochs = rounds * fit // fits
        fitting.fit(federation, datamodule=digits())
    return seen


@pytest.mark.seconds
def test_rounds_are_counted_by_a_schedule_of_several_epochs():
    def every_third(optimizer):
        return {"scheduler": decaying(optimizer), "frequency": 3}

    for _, round_, _, rate in rates("rounds", rounds=8, decays=every_third, participation=2):
        assert rate == pytest.approx(0.1 * GAMMA ** ((round_ - 1) // 3), rel=1e-6)


def test_a_site_counts_its_rounds():
    seen, hub = [], LocalHub(seed=1)

    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.line(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [{"scheduler": decaying(optimizer), "frequency": 3}]

    class Noting(FedAvg):
        def begin_epoch(self, epoch, local_epochs):
            [optimizer] = self.trainer.optimizers
            seen.append((self.trainer.current_epoch // local_epochs, optimizer.param_groups[0]["lr"]))

    def site():
        fitting = trainer(14, callbacks=[FederatedLoop(hub.link, every_n_epochs=2)])
        fitting.fit(Noting(learner=Line(), scheduler_counts="rounds"), DataLoader(TensorDataset(torch.ones(4, 2))))

    for one in range(2):
        hub.add(one, site)
    hub.run()
    assert len(seen) == 2 * 14
    for completed, rate in seen:
        assert rate == pytest.approx(0.1 * GAMMA ** (completed // 3), rel=1e-6)


def test_a_schedule_that_does_not_say_where_it_is_counts_epochs_only():
    def chained(optimizer):
        return ChainedScheduler([decaying(optimizer)])

    assert rates("epochs", rounds=1, decays=chained)
    with pytest.raises(ConfigError, match=r"^model\.scheduler_counts=rounds: a ChainedScheduler does not say"):
        rates("rounds", decays=chained)


@pytest.mark.seconds
@pytest.mark.parametrize("fits", [1, 3])
def test_rates_by_the_federations_rounds(fits):
    """Whoever takes part, and also where clients' fits end and start again in between."""
    seen = rates("rounds", fits=fits, participation=2)
    assert len(seen) == 6 * 2 * 2
    for _, round_, _, rate in seen:
        assert rate == pytest.approx(0.1 * GAMMA ** (round_ - 1), rel=1e-6)
    trained = [client for client, _, epoch, _ in seen if epoch == 0]
    assert len(set(trained)) > 2  # else nobody missed a round
    assert any(client not in trained[:2] for client in trained)


@pytest.mark.seconds
def test_rates_by_a_clients_own_epochs():
    epochs = dict.fromkeys(range(4), 0)
    for member, _, _, rate in rates("epochs", participation=2):
        assert rate == pytest.approx(0.1 * GAMMA ** epochs[member], rel=1e-6)
        epochs[member] += 1
