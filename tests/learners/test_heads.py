"""Features and logits of a learner's own steps, read and replaced; further modules that train with it."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING, names_of_head
from lit_pfl.errors import ConfigError
from lit_pfl.learners import AddLogits, at_head, find_head, log_mixture, sizes_of_head
from lit_pfl.methods import CCVR, FedCP, FedGen, FedGH, FedRoD
from lit_pfl.testing import check_method
from tiny import client, digits, run, weights


class Owner(L.LightningModule):
    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 10)))
        self.calls = calls

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        for _ in range(self.calls - 1):
            self.net(images)
        logits = self.net(images) if self.calls else images.flatten(1)[:, :10] + 0 * self.net[1].bias.sum()
        return nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch():
    torch.manual_seed(0)
    return torch.randn(5, 1, 8, 8), torch.arange(5)


def test_what_goes_in_and_comes_out_is_seen_and_nothing_changes():
    owner = Owner()
    head = owner.net[3]
    plain = owner.training_step(batch(), 0)
    with at_head(head) as seen:
        assert torch.equal(owner.training_step(batch(), 0), plain)
    assert torch.equal(seen.features, owner.net[:3](batch()[0]))
    assert torch.equal(seen.logits, owner.net(batch()[0]))
    assert not head._forward_hooks
    assert not head._forward_pre_hooks


def test_both_can_be_replaced():
    owner, given = Owner(), {}

    def logits(h, z):
        given["h"], given["z"] = h, z
        return z * 2

    with at_head(owner.net[3], features=lambda h: h + 1, logits=logits):
        loss = owner.training_step(batch(), 0)
    h = owner.net[:3](batch()[0])
    expected = nn.functional.cross_entropy(2 * owner.net[3](h + 1), batch()[1])
    torch.testing.assert_close(loss, expected)
    assert torch.equal(given["h"], h)  # as the body made them


def test_features_of_more_dimensions_are_flat():
    convolution = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with at_head(convolution, features=lambda h: 0 * h) as seen:
        made = convolution(torch.randn(3, 12, 1, 1))
    assert seen.features.shape == (3, 12)
    assert torch.equal(made, convolution[1].bias.expand(3, 4))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [(r"^net\.3\.", "net.3.0"), (r"^net", "net"), (r"^net\.1\.w|^net\.3", None), (r"weight$", None)],
)
def test_the_head_is_the_one_module_with_these_names(pattern, path):
    owner = Owner()
    names = names_of_head(owner, pattern)
    if path is None:
        with pytest.raises(ConfigError, match="model.head names parameters of several modules, or some of a module's"):
            find_head(owner, names, True, "MOON")
    else:
        assert find_head(owner, names, True, "MOON") is owner.get_submodule(path)


def test_sizes():
    assert sizes_of_head(Owner().net, "MOON") == (64, 10)
    with pytest.raises(ConfigError, match="MOON needs a head with a linear layer"):
        sizes_of_head(nn.Conv2d(1, 2, 3), "MOON")


@pytest.mark.parametrize("calls", [0, 2])
def test_a_head_that_is_not_called_once_is_named(calls):
    with at_head((owner := Owner(calls)).net[3]) as seen:
        owner.training_step(batch(), 0)
    with pytest.raises(ConfigError, match=f"training_step calls once, and it is called {calls} times"):
        seen.features  # noqa: B018


def test_other_shapes_are_named():
    linear = nn.Linear(4, 2)
    for x, words in ((torch.zeros(4), r"given \(B, d\) features; they are of shape \(4,\)"),
                     (torch.zeros(3, 5, 4), r"returns \(B, C\) logits; they are of shape \(3, 5, 2\)")):  # fmt: skip
        with pytest.raises(ConfigError, match=words), at_head(linear):
            linear(x)


def test_a_module_in_place_of_logits_goes_along_into_a_copy():
    head, own = nn.Linear(4, 2), nn.Linear(4, 2)
    with at_head(head, logits=AddLogits(own)):
        kept = copy.deepcopy(head)
    x = torch.randn(3, 4)
    expected = head(x) + own(x)
    with torch.no_grad():
        own.weight.zero_()
    torch.testing.assert_close(kept(x), expected)


def test_log_mixture():
    z, p = torch.randn(3, 4), torch.eye(4)[:3]
    assert log_mixture(z, p, 0.0) is z
    torch.testing.assert_close(log_mixture(z, p, 0.25).exp(), 0.25 * p + 0.75 * z.softmax(1))
    assert log_mixture(z, p, 1.0).isfinite().all()


class Widened(Classifying):
    """Adds two layers' logits, of which one travels."""

    shares = EVERYTHING
    shared_extras = frozenset({"common"})

    def configure_state(self):
        self.extra = nn.ModuleDict({n: nn.Linear(self.num_features, self.num_logits) for n in ("common", "own")})

    def objective(self, batch, batch_idx):
        with self.at_head(logits=lambda h, z: z + self.extra["common"](h) + self.extra["own"](h)):
            return super().objective(batch, batch_idx)


def test_further_modules_train_and_travel_or_not():
    federation = run(client(Widened), digits(2, train_fraction=0.1), rounds=2, evaluate="after")
    one, other = federation.clients.values()
    names = {name for name in one.upload() if name.startswith("extra")}
    assert names == {"extra.common.weight", "extra.common.bias"}
    for member in (one, other):
        member.download(federation.coordinator.server.reply(0))
    assert torch.equal(one.extra["common"].weight, other.extra["common"].weight)
    assert not torch.equal(one.extra["own"].weight, other.extra["own"].weight)
    momenta = one.trainer.optimizers[0].state
    assert all(weight in momenta for weight in one.extra.parameters())
    assert weights(federation)[0].keys() >= {"extra.own.weight", "extra.common.weight"}


@pytest.mark.slow
def test_a_method_with_further_modules_keeps_every_rule():
    check_method(Widened)


@pytest.mark.parametrize("calls", [0, 2])
def test_a_learner_that_does_not_call_its_head_once_is_refused_before_training(calls):
    with pytest.raises(ConfigError, match=rf"model\.head: this method needs a head that .* called {calls} times"):
        run(Widened(learner=Owner(calls), head=r"^net\.3\."), digits(2))


@pytest.mark.parametrize("method", [CCVR, FedCP, FedGen, FedGH, FedRoD])
def test_a_head_that_pools_images_is_refused_where_it_would_be_given_features(method):
    class Pools(Owner):
        def __init__(self) -> None:
            super().__init__()
            head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ReLU(), head)

    name = method.__name__
    with pytest.raises(
        ConfigError, match=rf"^model\.head: {name} gives heads \(B, d\) features, and Sequential cannot"
    ):
        run(method(learner=Pools(), head=r"^net\.3"), digits(2), rounds=1)
