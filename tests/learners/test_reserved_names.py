"""A learner's tensor cannot have a name under which its method sends something else."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl import Client, Federation
from lit_pfl import methods as M
from lit_pfl.core.sharing import is_reserved
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from tiny import Learner, Site, trainer


class Named(Learner):
    """It scales what its network makes of flat images; the scale's name may be any."""

    example_input_array = torch.zeros(1, 64)

    def __init__(self, name: str = "scale") -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 10))
        *path, leaf = name.split(".")
        for part in path:
            self.add_module(part, nn.Module())
        self.name = name
        self.get_submodule(".".join(path)).register_parameter(leaf, nn.Parameter(torch.ones(())))

    def forward(self, images):
        return self.head(self.body(images) * self.get_parameter(self.name))

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))


def fit(method: Client) -> Federation:
    torch.manual_seed(0)
    federation = Federation(method, seed=1)
    samples = TensorDataset(torch.randn(8, 64), torch.arange(8))
    trainer(2).fit(federation, datamodule=PerClient([Site(samples, 4) for _ in range(2)], num_classes=10))
    return federation


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (M.FedAvg, "extra.scale"),
        (M.FedDyn, "alpha"),
        (M.FedNova, "steps"),
        (M.Scaffold, "control.scale"),
        (M.AgnosticFL, "loss"),
        (M.IFCA, "cluster"),
        (M.SimFed, "criteria_input"),
        (M.FedFOMO, "affinity"),
    ],
)
def test_it_is_refused_before_anything_is_trained(method, name):
    with pytest.raises(ConfigError, match=rf"^model.learner: '{name}' is a name under which {method.__name__} sends"):
        fit(method(learner=Named(name)))


@pytest.mark.parametrize("options", [{"local": "alpha"}, {"shares": "body|head"}])
def test_what_stays_at_home_may_have_any_name(options):
    assert fit(M.FedDyn(learner=Named("alpha"), **options)).clients.keys() == {0, 1}


def test_a_dot_stands_for_a_beginning_or_an_end():
    assert is_reserved("step", "step")
    assert not is_reserved("steps", "step")
    assert is_reserved("control.weight", "control.")
    assert not is_reserved("body.control.weight", "control.")
    assert is_reserved("body.assignment", ".assignment")
    assert not is_reserved("assignment", ".assignment")


def test_what_other_methods_reserve_is_free():
    assert fit(M.FedAvg(learner=Named("alpha"))).clients.keys() == {0, 1}
    assert {"alpha", "extra."} <= M.FedDyn.all_reserved()
