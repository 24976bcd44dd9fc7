"""An optimizer's step without the label that it has for PyTorch's profiler."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lit_pfl.lightning_internals.lean_loop import STEP_ONCE
from lit_pfl.lightning_internals.optimizer_step import drop_gradients, take_step

LABELS = {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"}
#: those that want sparse gradients, two-dimensional parameters, or are of no use by themselves
ODD = {torch.optim.SparseAdam, torch.optim.Optimizer}
KINDS = sorted(STEP_ONCE - ODD, key=lambda kind: kind.__name__)


def made(kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    return layer, kind(layer.parameters(), **{"lr": 0.1, **options})


def train(layer, step, zero_grad):
    for seed in range(3):
        torch.manual_seed(seed)
        layer(torch.randn(4, 3)).square().sum().backward()
        step()
        zero_grad()
        assert layer.weight.grad is None
    return layer.weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_pytorch(kind):
    layer, optimizer = made(kind)
    expected = train(layer, optimizer.step, optimizer.zero_grad)
    layer, optimizer = made(kind)
    assert torch.equal(train(layer, lambda: take_step(optimizer), lambda: drop_gradients(optimizer)), expected)


def test_labels_are_left_out_until_a_profiler_is_on():
    called = []

    class Noting(torch.autograd.profiler.record_function):
        def __init__(self, name, *args):
            called.append(name)
            super().__init__(name, *args)

    layer, optimizer = made()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "record_function", Noting)
        train(layer, lambda: take_step(optimizer), lambda: drop_gradients(optimizer))
        assert not called
        train(layer, optimizer.step, optimizer.zero_grad)
        assert set(called) == LABELS
    with torch.profiler.profile() as profile:
        train(layer, lambda: take_step(optimizer), lambda: drop_gradients(optimizer))
    assert {event.key for event in profile.key_averages()} >= LABELS


HOOKS = [
    ("register_step_pre_hook", register_optimizer_step_pre_hook),
    ("register_step_post_hook", register_optimizer_step_post_hook),
]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("of_one", "of_all"), HOOKS)
def test_hooks_are_called(of_one, of_all, everywhere):
    called = []
    layer, optimizer = made()
    register = of_all if everywhere else getattr(optimizer, of_one)
    handle = register(lambda *_: called.append(1))
    train(layer, lambda: take_step(optimizer), lambda: drop_gradients(optimizer))
    handle.remove()
    assert len(called) == 3


@pytest.mark.parametrize("places", [(None, None), (torch.optim.SGD,) * 2, (torch.optim.SGD, torch.optim.Optimizer)])
def test_what_somebody_has_put_in_place_of_a_method_is_called(monkeypatch, places):
    called = []
    layer, optimizer = made()
    for name, kind in zip(("step", "zero_grad"), places, strict=True):
        own, place = getattr(optimizer, name), kind or optimizer
        monkeypatch.setattr(place, name, lambda *_, name=name, own=own: called.append(name) or own())
    train(layer, lambda: take_step(optimizer), lambda: drop_gradients(optimizer))
    assert called == ["step", "zero_grad"] * 3


def test_a_scheduler_sees_the_step():
    _, optimizer = made()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take_step(optimizer)
    assert optimizer._opt_called  # or it would warn
