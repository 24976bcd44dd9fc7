"""Learners that collect what their steps gave, under methods in which one of several learners rests for an epoch."""

import functools

import lightning as L
import pytest
import torch
from torch import nn

from lit_pfl.data import PerClient
from lit_pfl.methods import Ditto, FedAvg, FedPHP, FedSLR, PFedMe, StandAlone
from tiny import Learner, run


class Collects(Learner):
    """The mean over an epoch as Lightning 2's guide writes it."""

    def __init__(self, wrong=False):
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3))
        self.losses, self.wrong, self.means = [], wrong, 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()
        self.means += 1
        if self.wrong:
            raise RuntimeError("this is wrong")


def fitted(method, **options):
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    data = PerClient([L.LightningDataModule.from_datasets(samples, batch_size=4) for _ in range(2)])
    return run(method, data, seed=1, **options)


@pytest.mark.parametrize(
    "make",
    [PFedMe, FedSLR, FedPHP, lambda **given: Ditto(schedule="separate", **given)],
    ids=["PFedMe", "FedSLR", "FedPHP", "Ditto"],
)
def test_a_learner_at_rest_may_find_nothing_at_the_end_of_an_epoch(make):
    federation = fitted(make(learner=Collects(), head="^head"), local_epochs=2)
    for member in federation.clients.values():
        assert sum(learner.means for learner in member.learners.values()) > 0


class OnTheInstance(Collects):
    """Has a hook that its class does not have."""

    on_train_epoch_end = L.LightningModule.on_train_epoch_end

    def __init__(self):
        super().__init__(wrong=True)
        self.on_train_epoch_end = functools.partial(Collects.on_train_epoch_end, self)


@pytest.mark.parametrize("method", [PFedMe, FedAvg, StandAlone, Ditto])
@pytest.mark.parametrize("learner", [functools.partial(Collects, wrong=True), OnTheInstance])
def test_what_is_wrong_at_the_end_of_a_trained_epoch_is_said(method, learner):
    with pytest.raises(RuntimeError, match="this is wrong"):
        fitted(method(learner=learner()))
