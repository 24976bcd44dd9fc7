"""A part of a learner that has two names, and a weight in two places, are trained as what they are: one."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.learners import call_with
from lit_pfl.methods import APFL, Ditto, FedAvg, FedRep, FedSLR, PerFedAvg
from tiny import Site, assert_equal, run


class Classifier(L.LightningModule):
    """Its network is one, in which the head is found by a regular expression."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Named(Classifier):
    """Says by attributes what its body and its head are."""

    def __init__(self):
        super().__init__()
        self.body, self.head = self.net[:2], self.net[2]


def site(client):
    draw = torch.Generator().manual_seed(client)
    return Site(TensorDataset(torch.randn(16, 5, generator=draw), torch.randint(2, (16,), generator=draw)), 8)


METHODS = {
    "FedAvg": lambda **options: FedAvg(**options),
    "FedRep": lambda **options: FedRep(**options),
    "Ditto": lambda **options: Ditto(**options),
    "APFL": lambda **options: APFL(adaptive=True, **options),
    "PerFedAvg": lambda **options: PerFedAvg(alpha=0.1, **options),
    "PerFedAvg, Hessian": lambda **options: PerFedAvg(alpha=0.1, order="hessian_free", **options),
    "FedSLR": lambda **options: FedSLR(**options),
    "FedSLR, LPGD": lambda **options: FedSLR(solver="LPGD", lam=0.01, **options),
}


class CopiesItself(nn.Module):
    """Its copies have weights of their own, wherever else these are, as a TensorDict's."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def __deepcopy__(self, memo):
        return CopiesItself(nn.Parameter(self.weight.detach().clone()))


class Early(Classifier):
    def __init__(self):
        super().__init__()
        self.loss = CopiesItself(self.net[0].weight)


class Late(Classifier):
    def configure_model(self):
        self.loss = CopiesItself(self.net[0].weight)


def test_a_weight_that_copies_have_twice_is_named_and_made_in_configure_model_it_is_one():
    data = PerClient([site(client) for client in range(2)])
    for method, learner in ((FedAvg, Early), (APFL, Late)):
        with pytest.raises(ConfigError, match=r"in a copy .*net\.0\.weight and .*loss\.weight are no longer one"):
            run(method(learner=learner()), data)
    for client in run(FedAvg(learner=Late()), data).clients.values():
        assert client.learner.loss.weight is client.learner.net[0].weight


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_second_name_changes_nothing(method):
    runs = []
    for kind, options in ((Classifier, {"head": r"^net\.2\.", "encoder": "net.0"}), (Named, {})):
        torch.manual_seed(0)
        federation = run(method(learner=kind(), **options), PerClient([site(client) for client in range(2)]), seed=1)
        learners = [learner.net for client in federation.clients.values() for learner in client.learners.values()]
        runs.append(({i: net.state_dict() for i, net in enumerate(learners)}, federation.trainer.callback_metrics))
    (plain, loss), (named, same_loss) = runs
    assert_equal(plain, named)
    assert loss["test/loss"] == same_loss["test/loss"]


def test_other_tensors_are_taken_wherever_a_module_uses_its_own_and_leave_no_trace():
    module = Named()
    module.net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    module.body, module.head = module.net
    module.head.weight = own = module.body.weight
    out = call_with({"net.0.weight": torch.eye(4, 3)}, module, torch.arange(4))
    assert torch.equal(out, torch.eye(4, 3) @ torch.eye(3, 4))
    assert module.net[0].weight is module.net[1].weight is own
