"""Methods that replace layers, and learners whose optimizers, steps or encoders do not go with that."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FactorizedFL, FedAvg, PFedPara, SimFed
from tiny import Learner, run

REPLACING = [SimFed, PFedPara, FactorizedFL]


class Small(Learner):
    def __init__(self, body=None):
        super().__init__(body or nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))


class MadeBefore(Small):
    def __init__(self):
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.made


class ByName(Small):
    def configure_optimizers(self):
        named = [(name, weight) for name, weight in self.named_parameters() if name.endswith(("weight", "bias"))]
        return torch.optim.SGD([weight for _, weight in named], lr=0.1)


class Sorting(Small):
    def configure_optimizers(self):
        weights = dict(self.named_parameters())
        return torch.optim.SGD([weights["body.0.weight"]], lr=0.1)


class HeadAlone(Small):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class AskingForWeights(Small):
    def training_step(self, batch, batch_idx):
        if not any(type(part) is nn.Linear for part in self.body):
            raise ValueError("no linear layer")
        return super().training_step(batch, batch_idx)


class Careful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        if bool((x < 0).any()):
            raise ValueError("counts are not negative")
        return self.layer(x)


class OfCounts(Small):
    def __init__(self):
        super().__init__(Careful())


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return self.layer(x).mean(1)


def site(*shape: int) -> L.LightningDataModule:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(12, *(shape or (4,)), generator=draw)
    return L.LightningDataModule.from_datasets(TensorDataset(x, torch.arange(12) % 2), batch_size=4)


def fit(method, data=None):
    return run(method, data or PerClient([site(), site()]), rounds=1, seed=0)


@pytest.mark.parametrize("method", REPLACING)
def test_an_optimizer_of_layers_that_are_no_longer_there_is_refused(method):
    with pytest.raises(ConfigError, match=r"^model\.learner: the optimizer of MadeBefore has weights of layers that"):
        fit(method(learner=MadeBefore()))


def test_where_nothing_is_replaced_it_trains():
    learner = MadeBefore()
    before = learner.head.weight.detach().clone()
    assert not torch.equal(fit(FedAvg(learner=learner)).clients[0].learner.head.weight, before)


@pytest.mark.parametrize("method", REPLACING)
def test_an_optimizer_of_a_part_of_a_layer_is_refused(method):
    with pytest.raises(ConfigError, match=r"configure_optimizers of ByName leaves out body\.0\.(u|w1\.x)"):
        fit(method(learner=ByName()))


@pytest.mark.parametrize("method", REPLACING)
def test_configure_optimizers_that_fails_on_them_is_told_which_they_are(method):
    with pytest.raises(ConfigError, match=r"fails on layers that .* replaces \(body\.0 is a \w+ of .*KeyError"):
        fit(method(learner=Sorting()))


def test_other_errors_of_configure_optimizers_stay_as_they_are():
    class Wrong(Small):
        def configure_optimizers(self):
            raise KeyError("rate")

    with pytest.raises(KeyError, match="rate"):
        fit(FedAvg(learner=Wrong()))


def test_a_layer_that_no_optimizer_has_is_told():
    with pytest.warns(UserWarning, match=r"HeadAlone: no optimizer has a parameter of body\.0 \(body\.0\.u\)"):
        fit(SimFed(learner=HeadAlone()))


def test_a_step_that_looks_for_other_layers_is_told_what_there_is():
    with pytest.raises(ConfigError, match=r"\(its body\.0 is a FactorizedLinear under this method\): ValueError: no"):
        fit(FactorizedFL(learner=AskingForWeights()))


def test_an_encoder_that_cannot_take_noise_is_told():
    with pytest.raises(ConfigError, match=r"^model\.encoder: OfCounts cannot take the Gaussian noise .*counts are"):
        fit(SimFed(learner=OfCounts()))


class OfPairs(Small):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) % 2:
            raise Exception("pairs only")
        return super().training_step(batch, batch_idx)


def test_a_step_that_cannot_do_with_one_sample_takes_the_noise_twice():
    alone = Small()
    pairs = OfPairs()
    pairs.load_state_dict(alone.state_dict())
    one, two = (fit(SimFed(learner=learner)).clients[0] for learner in (alone, pairs))
    torch.testing.assert_close(two.embedding(), torch.cat([one.embedding()] * 2))
    torch.testing.assert_close(two.learner.state_dict(), one.learner.state_dict())


def test_inputs_of_different_shapes_are_told():
    with pytest.raises(ConfigError, match=r"of shape \[1, 5, 4\], and client 1's input has \[1, 7, 4\]; give clients"):
        fit(SimFed(learner=Small(Pooled())), PerClient([site(5, 4), site(7, 4)]))
