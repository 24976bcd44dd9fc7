"""A method outside the package is tested in one line, and a wrong one is caught."""

import subprocess
import sys

import pytest
import torch

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.methods import FedAvg
from lit_pfl.testing import MethodTester, assert_equal, check_method
from lit_pfl.testing.methods import uploads_and_replies_change_nothing


class Slower(FedAvg):
    """A method that is right: clients lose some of the way that they went."""

    def __init__(self, share: float = 0.1, **options):
        super().__init__(**options)
        self.share = share

    def begin_round(self):
        self.start = {name: weight.detach().clone() for name, weight in self.shared_weights().items()}

    def end_round(self):
        with torch.no_grad():
            for name, weight in self.shared_weights().items():
                weight.lerp_(self.start[name], self.share)


class Frozen(FedAvg):
    """Another one, FedBABU: the head is never trained, so it is the same everywhere also where it stays at home."""

    def configure_state(self):
        for name, weight in self.learner.named_parameters():
            weight.requires_grad_(name not in self.head_names)


class Forgets(FedAvg):
    """It keeps something from round to round that is in no checkpoint."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = 0

    def begin_round(self):
        self.rounds += 1

    def objective(self, batch, batch_idx):
        return super().objective(batch, batch_idx) * self.rounds


class ForgetfulServer(Server):
    def start(self, clients):
        super().start(clients)
        self.rounds = 0

    def aggregate(self, round, uploads):
        super().aggregate(round, uploads)
        self.rounds += 1

    def reply(self, client):
        return Payload({name: t / self.rounds if self.rounds else t for name, t in self.model.items()})


class ForgetsOnTheServer(FedAvg):
    def configure_server(self):
        return ForgetfulServer()


class Impure(FedAvg):
    """Its upload changes what is uploaded next."""

    def upload(self):
        payload = super().upload()
        for tensor in payload.values():
            tensor.mul_(1.01)
        return payload


class Draws(FedAvg):
    """Its upload is drawn anew whenever it is asked for."""

    def upload(self):
        return Payload({name: t + torch.randn_like(t) for name, t in super().upload().items()})


class SharesHeads(FedAvg):
    """It sends heads whatever they mean."""

    def is_shared(self, name, role):
        return role in self.shares


class AddsOutsideOfExtra(FedAvg):
    """No optimizer sees what it adds."""

    def configure_state(self):
        self.scale = torch.nn.Parameter(torch.ones(()))

    def objective(self, batch, batch_idx):
        return super().objective(batch, batch_idx) * self.scale


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("right", [Slower, Frozen])
def test_a_method_that_is_right_passes(right):
    check_method(right)


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (Forgets, "resumed equals uninterrupted"),
        (ForgetsOnTheServer, "resumed equals uninterrupted"),
        (Impure, ".*"),
        (Draws, ".*"),
        (SharesHeads, "heads are kept local"),
        (AddsOutsideOfExtra, "further parameters are trained"),
    ],
)
def test_a_wrong_method_is_caught(wrong, rule):
    with pytest.raises(AssertionError) as caught:
        check_method(wrong)
    assert rule == ".*" or f"(in lit_pfl.testing: {rule}" in caught.value.__notes__[-1]


@pytest.mark.parametrize("impure", [Impure, Draws])
def test_an_impure_upload_is_what_is_said(impure):
    with pytest.raises(AssertionError, match=r"client 0: a second upload/backbone\.\S+ differs"):
        uploads_and_replies_change_nothing(MethodTester(impure))


@pytest.mark.seconds
def test_what_is_forgotten_is_named():
    with pytest.raises(AssertionError, match=r"^weights/\d/learner\.\S+ differs") as caught:
        check_method(Forgets)
    assert "`configure_state`" in caught.value.__notes__[-1]
    assert "`kept`" in caught.value.__notes__[-1]


@pytest.mark.slow
def test_no_test_runner_is_needed():
    code = "import sys, lit_pfl.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_states_are_compared_bit_for_bit_also_where_they_hold_nan():
    nan = torch.tensor([1, torch.nan])
    assert_equal({"a": [nan]}, {"a": [nan.clone()]})
    for other in (torch.tensor([2, torch.nan]), torch.tensor([1.0, 1]), nan.double(), nan[None]):
        with pytest.raises(AssertionError, match="state/a/0"):
            assert_equal({"a": [nan]}, {"a": [other]}, "state")
