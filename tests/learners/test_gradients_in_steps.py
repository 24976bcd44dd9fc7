"""Modules that take gradients themselves: in a training step, as adversarial training does, or in a hook."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lit_pfl.methods as methods
from lit_pfl import Federation
from lit_pfl.data import PerClient
from tiny import Learner, Site, assert_equal, run, trainer


def rows(client):
    draw = torch.Generator().manual_seed(client)
    return TensorDataset(torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw))


class Net(Learner):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3))

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)


class Adversarial(Net):
    """FGSM."""

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        (gradient,) = torch.autograd.grad(self.loss(x, y), x)
        return self.loss((x + 0.1 * gradient.sign()).detach(), y)


class Leaves(Adversarial):
    """The same by ``backward()``, which leaves gradients of the weights."""

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        self.loss(x, y).backward()
        return self.loss((x + 0.1 * x.grad.sign()).detach(), y)


class Fisher(Net):
    """As elastic weight consolidation does."""

    def on_train_epoch_start(self):
        self.loss(*rows(9).tensors).backward()
        self.fisher = [weight.grad.square() for weight in self.parameters()]


@pytest.mark.parametrize("kind", [Adversarial, Leaves, Fisher])
def test_one_client_by_itself_is_a_plain_fit(kind):
    plain = kind()
    trainer(2).fit(plain, Site(rows(0), 8).train_dataloader())
    federation = run(methods.StandAlone(learner=kind()), PerClient([Site(rows(0), 8)]), seed=0)
    assert_equal(plain.state_dict(), federation.clients[0].learner.state_dict())


@pytest.mark.parametrize("method", ["FedAvg", "FedFOMO", "Ditto", "IFCA"])
def test_it_takes_part(method):
    federation = Federation(getattr(methods, method)(learner=Adversarial()), seed=0)
    sites = [Site(rows(k), 8) for k in range(3)]
    trainer(2).fit(federation, datamodule=PerClient(sites))
    assert not federation.coordinator.refused
    (scores,) = trainer().validate(federation, datamodule=PerClient(sites))  # in inference mode
    assert scores["val/loss"] > 0
