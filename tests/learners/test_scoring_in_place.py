"""A client is scored as a Trainer would do it, and left as it was, so that its training is a Trainer's too."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl import Federation
from lit_pfl.core.server import Server
from lit_pfl.data import PerClient
from lit_pfl.learners import unchanged
from lit_pfl.learners.scoring import transferred
from lit_pfl.links import LocalHub
from lit_pfl.methods import Ditto, FedAvg, FedSpa, PerFedAvg, StandAlone
from lit_pfl_callbacks import FederatedLoop
from tiny import Site, assert_equal, trainer

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class InOrder(Site):
    def __init__(self):
        super().__init__(TensorDataset(X, Y), 8)


class Momentum(L.LightningModule):
    """Follows its own network by a mean in place, like encoders that learn by contrast, and counts its steps."""

    def __init__(self):
        super().__init__()
        self.net, self.slow = nn.Linear(6, 1), nn.Linear(6, 1)
        self.slow.requires_grad_(False)
        self.assigned = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(5))
        self.means = {"loss": torch.zeros(())}

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.data.lerp_(own.data, 0.1)  # which a tensor does not count as a change
            self.assigned.data = self.assigned.data * 1.5
            self.queue[self.steps % 5] = x.mean() + 1
            self.steps += 1
        loss = nn.functional.mse_loss(self.net(x) + self.slow(x) * self.assigned, y * self.queue.mean())
        self.means["loss"] += loss.detach()
        return loss + 0.01 * self.means["loss"].sin() * self.net.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ScoredByTheSame(Momentum):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("kind", [Momentum, ScoredByTheSame])
def test_one_client_by_itself_is_a_plain_fit(kind):
    def made():
        torch.manual_seed(0)
        return kind()

    plain = made()
    trainer(3, limit_val_batches=0).fit(plain, InOrder().train_dataloader())
    federation = Federation(StandAlone(learner=made()), seed=0, threads=1)
    trainer(3, num_sanity_val_steps=2).fit(federation, datamodule=PerClient([InOrder()]))
    assert federation.rows[0].scores["loss"] > 0
    assert_equal(federation.clients[0].learner.state_dict(), plain.state_dict())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_tensors_are_put_back_where_they_were(around):
    module = nn.Linear(3, 2)
    module.register_buffer("edges", torch.eye(3).to_sparse())
    weight, bias, edges = module.weight, module.bias, module.edges
    view, values = weight.detach().view(-1), {name: x.clone() for name, x in module.state_dict().items()}
    untouched = bias._version
    with around(), unchanged(module):
        weight.data = weight * 2
        weight.data = torch.ones(7)
        edges *= 3
        module.edges = None
    assert module.weight is weight
    assert module.edges is edges
    assert_equal({**module.state_dict(), "edges": edges.to_dense()}, {**values, "edges": values["edges"].to_dense()})
    assert bias._version == untouched
    with torch.no_grad():
        view.zero_()
    assert not weight.any()


class Scaled(L.LightningModule):
    """Gets its batches ready on their way to the device."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 1)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return dict(zip(("x", "y"), batch, strict=True))

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {**super().transfer_batch_to_device(batch, device, dataloader_idx), "moved": True}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert batch.pop("moved")
        return {**batch, "x": batch["x"] * 100}

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class OnlyTrains(Scaled):
    validation_step = L.LightningModule.validation_step


@pytest.mark.parametrize("kind", [Scaled, OnlyTrains])
def test_batches_of_scores_go_through_the_learner_s_hooks(kind):
    data, own, fitting = PerClient([InOrder()]), Scaled(), trainer(1)
    federation = Federation(StandAlone(learner=kind()), seed=0, threads=1)
    fitting.fit(federation, datamodule=data)
    own.load_state_dict(federation.clients[0].learner.state_dict())
    (expected,) = trainer().validate(own, InOrder().val_dataloader(), verbose=False)
    assert fitting.callback_metrics["val/loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    (predicted,) = fitting.predict(federation, datamodule=data)
    assert torch.equal(predicted[0], torch.cat(trainer().predict(own, InOrder().val_dataloader())))


class Halved(InOrder):
    """Has a batch hook of its own, which takes apart what it is given."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch.pop(0) / 2, "y": batch.pop(0)}


def test_hooks_of_the_client_s_data_module_take_the_place_of_the_learner_s():
    federation, own, fitting = Federation(StandAlone(learner=Scaled()), seed=0, threads=1), Scaled(), trainer(1)
    fitting.fit(federation, datamodule=PerClient([Halved()]))
    own.load_state_dict(federation.clients[0].learner.state_dict())
    (expected,) = trainer().validate(own, datamodule=Halved(), verbose=False)
    assert fitting.callback_metrics["val/loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    learner, batch = type("Pops", (Scaled,), {"on_before_batch_transfer": Halved.on_before_batch_transfer})(), [X, Y]
    for one in (federation.clients[0].learner, learner):  # one has the hook itself
        assert torch.equal(transferred(one, batch)["x"], 50 * X)
        assert len(batch) == 2


@pytest.mark.parametrize("method", [PerFedAvg, FedSpa])
def test_batches_that_a_method_looks_at_by_itself_go_through_them_too(method):
    trainer(2).fit(Federation(method(learner=OnlyTrains()), seed=0, threads=1), datamodule=PerClient([InOrder()]))


heard: list[Any] = []


class Asks(OnlyTrains):
    """Notes what its Trainer says that it does, and keeps drawing."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.5))

    def note(self, step):
        says = self.trainer
        flags = (says.training, says.validating, says.testing, says.predicting)
        heard.append((step, says.state.stage.value, flags.index(True), says.model is self))
        return {"drawing": float(self.net[1].training)}

    def validation_step(self, batch, batch_idx):
        self.log_dict(self.note("validation_step"))

    def test_step(self, batch, batch_idx):
        self.log_dict(self.note("test_step"))

    def predict_step(self, batch, batch_idx):
        self.note("predict_step")
        return self.net(batch["x"])

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        assert not self.net[1].training
        self.net[1].train()

    def on_validation_model_train(self):
        heard.append("on_validation_model_train")
        super().on_validation_model_train()


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_the_mode_is_asked_for_under_a_trainer_of_one_s_own_too(method):
    hub, fitting = LocalHub(seed=0), trainer(1)
    loop, data = FederatedLoop(hub.link), InOrder()
    fitting.callbacks.append(loop)
    hub.add(0, lambda: fitting.fit(method(learner=Asks()), data.train_dataloader(), data.val_dataloader()))
    hub.run(Server())
    assert fitting.callback_metrics["drawing"] == 1


class AsksInTraining(OnlyTrains):
    def training_step(self, batch, batch_idx):
        heard.append(self.trainer.state.stage.value)
        return super().training_step(batch, batch_idx)


def test_the_trainer_says_that_it_evaluates_and_is_asked_for_the_mode():
    heard.clear()
    data, fitting = PerClient([InOrder()]), trainer(1)
    federation = Federation(StandAlone(learner=Asks()), seed=0, threads=1, local_epochs=1)
    fitting.fit(federation, datamodule=data)
    assert fitting.callback_metrics["val/drawing"] == 1
    assert fitting.callback_metrics["test/drawing"] == 0
    learner = federation.clients[0].learner
    after = {part: part.training for part in federation.clients[0].modules()}
    fitting.predict(federation, datamodule=data)
    validated, tested = ("validation_step", "validate", 1, True), ("test_step", "test", 2, True)
    predicted = ("predict_step", "predict", 3, True)
    assert heard == [*[validated] * 3, "on_validation_model_train", *[tested] * 3, *[predicted] * 3]
    assert after == {part: part.training for part in federation.clients[0].modules()}
    assert learner.trainer.model is federation.clients[0]
    assert not learner.trainer.evaluating


def test_it_says_so_too_where_the_loss_is_the_score():
    heard.clear()
    client = StandAlone(learner=AsksInTraining())
    federation = Federation(client, seed=0, threads=1)
    trainer(1, num_sanity_val_steps=1).fit(federation, datamodule=PerClient([InOrder()]))
    first_look = ["train"]  # whether it can do with the data
    assert heard == first_look + ["sanity_check"] * 3 + ["train"] * 3 + ["validate"] * 3 + ["test"] * 3
