"""Learners of double or bfloat16 weights, under methods that have networks of their own beside the head."""

import pytest
import torch
from torch import nn

import lit_pfl.methods as methods
from tiny import Learner, digits, run

NAMES = ["FedCP", "CCVR", "FedGH", "FedGen", "FedKD", "GPFL"]


class Net(Learner):
    def __init__(self, dtype):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10), lr=0.05)
        self.to(dtype)

    def forward(self, images):
        return super().forward(images.to(self.dtype))


def fit(name, dtype):
    federation = run(getattr(methods, name)(learner=Net(dtype)), digits(3), quorum=0)
    assert not federation.coordinator.refused
    return federation


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-4), (torch.bfloat16, 0.1)])
def test_other_kinds_of_numbers_train_to_nearly_the_same(name, dtype, near):
    single, other = fit(name, torch.float32), fit(name, dtype)
    for k, member in other.clients.items():
        assert {weight.dtype for weight in member.learner.parameters()} == {dtype}
        for a, b in zip(single.clients[k].learner.parameters(), member.learner.parameters(), strict=True):
            assert torch.allclose(a, b.to(a), atol=near)
