"""Learners that step several optimizers themselves, under the methods that only change what is averaged."""

import lightning as L
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lit_pfl.methods as methods
from lit_pfl import Federation, Server
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.links import LocalHub
from lit_pfl.methods import IFCA, AgnosticFL, FedAvg, FedFOMO, SimFed, StandAlone
from lit_pfl_callbacks import FederatedLoop
from tiny import always_first, assert_equal, trainer, weights

TAKE_IT = {
    "StandAlone": {}, "FedAvg": {}, "FedPer": {"head": "^discriminator.2"}, "LGFedAvg": {"head": "^discriminator.2"},
    "ClusteredFL": {}, "FedFOMO": {}, "SimFed": {"encoder": "discriminator.0", "factorization": None}, "AgnosticFL": {},
    "PFedPara": {}, "FedAvgM": {}, "FedAdagrad": {}, "FedAdam": {}, "FedYogi": {}, "FedExP": {}, "L2GD": {}, "IFCA": {},
    "PFedSim": {"head": "^discriminator.2", "warmup_rounds": 1}, "FedCAC": {},
    "PFedLA": {},
}  # fmt: skip


class GAN(L.LightningModule):
    """As in Lightning's documentation: two optimizers in turn, one schedule, no validation."""

    def __init__(self, returns_loss=True):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        self.returns_loss, self.steps = returns_loss, 0

    def forward(self, z):
        return self.generator(z)

    def _loss(self, images, real):
        wanted = torch.full((len(images), 1), float(real))
        return nn.functional.binary_cross_entropy_with_logits(self.discriminator(images), wanted)

    def training_step(self, batch, batch_idx):
        (images,) = batch
        first, second = self.optimizers()
        z = torch.randn(len(images), 2)
        self.toggle_optimizer(first)
        g_loss = self._loss(self(z), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.clip_gradients(first, 1.0)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        with second.toggle_model():
            d_loss = (self._loss(images, True) + self._loss(self(z).detach(), False)) / 2
            self.manual_backward(d_loss)
            second.step()
            second.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.steps += 1
        return {"loss": g_loss + d_loss} if self.returns_loss else None

    def configure_optimizers(self):
        one = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        other = torch.optim.Adam(self.discriminator.parameters(), lr=0.01)
        return [one, other], [torch.optim.lr_scheduler.StepLR(one, 1, 0.5)]


def loader(client):
    samples = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(client)) + client)
    return DataLoader(samples, 4, shuffle=True)


class Data(L.LightningDataModule):
    def __init__(self, client):
        super().__init__()
        self.client = client

    def train_dataloader(self):
        return loader(self.client)

    test_dataloader = train_dataloader


def fit(method, rounds=2, ckpt_path=None, fitting=None, clients=3, **options):
    federation = Federation(method, **{"seed": 1, "threads": 1, **options})
    (fitting or trainer(rounds)).fit(
        federation, datamodule=PerClient([Data(k) for k in range(clients)]), ckpt_path=ckpt_path
    )
    return federation


@pytest.mark.seconds
@pytest.mark.parametrize("name", always_first(TAKE_IT))
def test_a_gan_trains_and_a_resumed_run_is_the_same(name, tmp_path):
    def run(folder, rounds, ckpt_path=None):
        saving = trainer(rounds, callbacks=[LastCheckpoint(tmp_path / folder)], enable_checkpointing=True)
        method = getattr(methods, name)(learner=GAN(), **TAKE_IT[name])
        return fit(method, rounds, ckpt_path, saving)

    whole = run("whole", 3)
    assert not whole.coordinator.refused
    assert [client.learner.steps for client in whole.clients.values()] == [9] * 3
    run("cut", 1)
    assert_equal(weights(whole), weights(run("cut", 3, tmp_path / "cut" / "last.ckpt")))
    assert torch.isfinite(torch.tensor(whole.trainer.callback_metrics["train/loss"]))


class Looks(ManualOptimBoringModel):
    """Lightning's demo, which asks for the class of its optimizer."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(optimizer, torch.optim.SGD)
        assert isinstance(self.optimizers(use_pl_optimizer=False), torch.optim.Optimizer)
        assert optimizer.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", [FedAvg, FedFOMO, IFCA])
def test_the_optimizer_of_a_batch_that_is_only_looked_at_is_one(method):
    data = [L.LightningDataModule.from_datasets(RandomDataset(32, 8), RandomDataset(32, 8)) for _ in range(3)]
    federation = Federation(method(learner=Looks()), threads=1)
    trainer(2).fit(federation, datamodule=PerClient(data))
    assert not federation.coordinator.refused


def test_a_step_that_asserts_something_is_refused_in_a_line():
    class Asserts(GAN):
        def training_step(self, batch, batch_idx):
            assert len(batch) == 7, "seven"

    with pytest.raises(ConfigError, match="^model.learner: Asserts has no training loss .*: AssertionError: seven"):
        fit(FedAvg(learner=Asserts()), threads=None)


class SharpnessAware(L.LightningModule):
    """Steps to where the loss is higher, by the gradients, and takes the gradients there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            moves = [(weight, 0.05 * weight.grad) for weight in self.parameters()]
            for weight, move in moves:
                weight.add_(move)
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        with torch.no_grad():
            for weight, move in moves:
                weight.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_may_read_gradients_and_change_weights():
    samples = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    federation, alone = Federation(StandAlone(learner=SharpnessAware()), seed=1), SharpnessAware()
    trainer(2).fit(federation, datamodule=PerClient([L.LightningDataModule.from_datasets(samples, batch_size=12)]))
    trainer(2).fit(alone, DataLoader(samples, 12))
    torch.testing.assert_close(federation.clients[0].learner.net.weight, alone.net.weight)


def test_alone_it_is_the_same_training():
    federation, module = fit(StandAlone(learner=GAN()), clients=1), GAN()
    assert not torch.equal(federation.clients[0].learner.generator[0].weight, module.generator[0].weight)
    schedule = federation.clients[0].trainer.lr_scheduler_configs[0].scheduler
    assert schedule.get_last_lr() == [0.01 * 0.25]


@pytest.mark.seconds
def test_the_others_refuse_with_the_reason():
    for name in methods.__all__:
        # no batch norm for FedBN here, and no adapters for FedIT and the like
        if name in TAKE_IT or name == "FedBN" or issubclass(getattr(methods, name), methods.FedIT):
            continue
        with pytest.raises(
            ConfigError, match=r"^model\.learner: GAN steps its optimizers itself .*, but \S+ "
        ) as error:
            fit(getattr(methods, name)(learner=GAN(), head="^discriminator.2"))
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"but model\.factorization adds the L1 norm of mu to the loss"):
        fit(SimFed(learner=GAN(), encoder="discriminator.0"))


class Other(FedAvg):
    def objective(self, batch, batch_idx):
        return 2 * super().objective(batch, batch_idx)


def test_a_method_of_ones_own_that_changes_the_loss_refuses_too():
    with pytest.raises(ConfigError, match=r"but Other minimizes more than the learner's loss"):
        fit(Other(learner=GAN()))


@pytest.mark.parametrize("method", [AgnosticFL, FedFOMO, IFCA])
def test_methods_that_compare_losses_need_one(method):
    with pytest.raises(ConfigError, match=r"^model\.learner: training_step of GAN returns no loss, and .* compares"):
        fit(method(learner=GAN(returns_loss=False)))
    fit(FedAvg(learner=GAN(returns_loss=False)))


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: FedAvg(learner=module)])
def test_by_the_callback(wrap):
    hub, modules = LocalHub(), [GAN() for _ in range(2)]
    for client, module in enumerate(modules):
        fitting = trainer(2, callbacks=[FederatedLoop(hub.link)])
        hub.add(client, lambda t=fitting, m=wrap(module), c=client: t.fit(m, loader(c)))
    hub.run(Server())
    assert_equal({0: dict(modules[0].state_dict())}, {0: dict(modules[1].state_dict())})
