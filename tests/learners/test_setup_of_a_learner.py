"""Learners that set weights and buffers in ``setup``, such as pretrained ones, and statistics of their data."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines import Local
from lit_pfl.links import LocalHub
from lit_pfl.methods import MOON, FedAvg, FedFOMO, FedSpa, StandAlone
from lit_pfl_callbacks import FederatedLoop
from tiny import Learner, assert_equal, trainer

HOOKS = pytest.mark.parametrize("hook", ["setup", "on_fit_start"])


class Pretrained(Learner):
    """Begins with weights of 0.1, and with the mean of its own targets."""

    def __init__(self, hook: str = "setup") -> None:
        super().__init__(nn.Linear(6, 4), nn.Linear(4, 1))
        self.hook, self.calls = hook, 0
        self.register_buffer("mean", torch.zeros(()))

    def setup(self, stage: str) -> None:
        if self.hook == "setup" and stage == "fit":
            self.set_up()

    def on_fit_start(self) -> None:
        if self.hook == "on_fit_start":
            self.set_up()

    def set_up(self) -> None:
        self.calls += 1
        with torch.no_grad():
            for weight in self.parameters():
                weight.fill_(0.1)
        self.mean = self.trainer.datamodule.y.mean().reshape(1)  # of another shape, too

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1] + self.mean).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[1] + self.mean).square().mean())

    test_step = validation_step


class Data(L.LightningDataModule):
    def __init__(self, client: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(client)
        self.x, self.y = torch.randn(12, 6, generator=draw), torch.randn(12, 1, generator=draw) + client

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), 6)

    val_dataloader = test_dataloader = train_dataloader


def fit(method, learner: L.LightningModule, clients: int = 2, **options) -> Federation:
    federation = Federation(method(learner=learner), seed=0, threads=1, **options)
    trainer(3).fit(federation, datamodule=PerClient(Data, clients))
    return federation


@HOOKS
def test_one_client_is_trained_as_by_a_stock_trainer(hook):
    stock, learner = Pretrained(hook), Pretrained(hook)
    learner.load_state_dict(stock.state_dict())
    trainer(3).fit(stock, datamodule=Data(0))
    federation = fit(FedAvg, learner, 1)
    assert_equal(federation.clients[0].learner.state_dict(), stock.state_dict())
    assert (stock.calls, federation.clients[0].learner.calls) == (1, 2)  # here once on joining, too


@HOOKS
@pytest.mark.parametrize("method", [FedAvg, StandAlone])
def test_what_is_trained_is_still_there_after_the_fit(method, hook):
    federation = fit(method, Pretrained(hook))
    last = {row.client: row.scores for row in federation.rows}
    weights = {client: module.learner.body.weight.clone() for client, module in federation.clients.items()}
    assert not any(torch.all(weight == 0.1) for weight in weights.values())
    trainer(3).test(federation, datamodule=PerClient(Data, 2), verbose=False)
    assert {row.client: row.scores for row in federation.rows} == last


@pytest.mark.parametrize("method", [functools.partial(MOON, head="^head"), FedFOMO, FedSpa])
def test_what_a_method_remembers_takes_the_shapes_that_are_set(method):
    federation = fit(method, Pretrained())
    means = {tuple(tensor.shape) for name, tensor in federation.clients[0].named_buffers() if "mean" in name}
    assert means == {(1,)}


def test_clients_begin_with_what_the_first_of_them_sets():
    federation, away = (fit(FedAvg, Pretrained("on_fit_start"), engine=Local(awake=n)) for n in (None, 1))
    reply = federation.coordinator.server.reply(1)
    torch.testing.assert_close(reply["mean"], Data(0).y.mean()[None])
    assert_equal(dict(away.coordinator.server.reply(1)), dict(reply))


@pytest.mark.parametrize("local", [None, "mean"])
def test_some_are_scored_before_they_train_and_a_resumed_run_is_the_same(tmp_path, local):
    def run(folder, rounds, **options):
        federation = Federation(FedAvg(learner=Pretrained(), local=local), seed=0, participation=0.5, threads=1)
        saves = ModelCheckpoint(folder, save_last=True)
        trainer(rounds, callbacks=[saves], enable_checkpointing=True).fit(
            federation, datamodule=PerClient(Data, 4), weights_only=False, **options
        )
        return federation

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert resumed.rows == whole.rows
    assert_equal(resumed.ask(tensors), whole.ask(tensors))
    if local:
        means = [float(Data(k).y.mean()) for k in range(4)]
        assert [float(own["mean"]) for own in whole.ask(tensors).values()] == means


def tensors(client):
    return {name: x.clone() for name, x in client.learner.state_dict().items()}


def test_a_site_has_its_trained_weights_after_its_fit():
    hub, modules = LocalHub(seed=3), {}

    def site(number: int) -> None:
        modules[number] = FedAvg(learner=Pretrained())
        trainer(3, callbacks=[FederatedLoop(hub.link)]).fit(modules[number], datamodule=Data(number))

    for number in range(2):
        hub.add(number, functools.partial(site, number))
    reply = hub.run().server.reply(0)
    for module in modules.values():
        assert_equal(module.learner.body.weight.detach(), reply["body.weight"])
        assert module.learner.calls == 1


class Looks(Learner):
    """Looks at its Trainer's training batches while it is scored, as one that computes statistics anew."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def on_validation_start(self) -> None:
        assert_equal(torch.cat([x for x, _ in self.trainer.train_dataloader]), self.trainer.datamodule.x)
        assert self.trainer.num_training_batches == 2

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0]).mean())


@pytest.mark.parametrize("options", [{}, {"participation": 0.34}, {"engine": Local(awake=1)}])
def test_training_batches_are_a_client_s_own_while_it_is_scored(options):
    assert len(fit(FedAvg, Looks(), 3, **options).rows) == 3
