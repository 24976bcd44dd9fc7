"""Momentum encoders, teachers and averages are factorized as what they are copies of."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lit_pfl.errors import ConfigError
from lit_pfl.nn import FactorizedConv2d, HadamardConv2d, factorize, factorized_layers, hadamard, l1_norm_of_masks
from lit_pfl.nn.copies import copies_in

REPLACE = {
    "dense": lambda module: factorize(module, start="dense", rank=2),
    "paper": lambda module: factorize(module, start="paper"),
    "without mask": lambda module: factorize(module, mask=False),
    "Hadamard": lambda module: hadamard(module, personal=True),
}
replacements = pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE.keys())


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


class Momentum(nn.Module):
    """A network and its momentum copy, the copy before the original or after it."""

    def __init__(self, copy: nn.Module | None = None, first: bool = False) -> None:
        super().__init__()
        online = network()
        copy = (deepcopy(online) if copy is None else copy).requires_grad_(False)
        parts = {"target": copy, "online": online}
        for name in sorted(parts, reverse=first):
            self.add_module(name, parts[name])

    def update(self, momentum: float) -> None:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.mul_(momentum).add_(p, alpha=1 - momentum)


@replacements
@pytest.mark.parametrize("first", [False, True])
def test_a_copy_starts_equal_stays_frozen_and_follows(replace, first):
    module = replace(Momentum(first=first))
    assert [type(part) for part in module.online] == [type(part) for part in module.target]
    assert isinstance(module.target[0], FactorizedConv2d | HadamardConv2d)
    assert not any(p.requires_grad for p in module.target.parameters())
    assert all(p.requires_grad for p in module.online.parameters())
    x = torch.rand(3, 2, 4, 4)
    torch.testing.assert_close(module.target(x), module.online(x))
    module.online(x).sum().backward()
    with torch.no_grad():
        for p in module.online.parameters():
            p.add_(p.grad)
    before = [p.clone() for p in module.target.parameters()]
    module.update(0.5)
    for p, q, old in zip(module.online.parameters(), module.target.parameters(), before, strict=True):
        torch.testing.assert_close(q, (p + old) / 2)
    module.update(0.0)
    torch.testing.assert_close(module.target(x), module.online(x))


@pytest.mark.parametrize("start", ["dense", "paper", "released"])
def test_a_copy_with_other_values_keeps_them(start):
    teacher, x = network(1).eval(), torch.rand(3, 2, 4, 4)
    expected = teacher(x)
    module = factorize(Momentum(teacher), start=start, threshold=0.1)
    assert isinstance(module.target[0], FactorizedConv2d)
    torch.testing.assert_close(module.target(x), expected)
    module.update(0.9)


@pytest.mark.parametrize("name", ["without mask", "Hadamard"])
def test_where_factors_cannot_hold_its_values_both_stay_dense_and_a_line_says_so(name):
    module = Momentum(network(1))
    with pytest.warns(UserWarning, match="'target' is built like 'online' and frozen, but has other values.*dense"):
        REPLACE[name](module)
    assert type(module.online[0]) is type(module.target[0]) is nn.Conv2d


@replacements
def test_a_copy_changes_nothing_of_what_is_drawn(replace):
    alone, module = network(), Momentum(first=True)
    torch.manual_seed(5)
    replace(alone)
    torch.manual_seed(5)
    replace(module)
    assert all(map(torch.equal, alone.state_dict().values(), module.online.state_dict().values()))


@replacements
@pytest.mark.parametrize("frozen", [True, False])
def test_an_averaged_model_is_a_copy(replace, frozen):
    module = nn.Module()
    module.net = network()
    module.ema = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.5)).requires_grad_(not frozen)
    replace(module)
    assert type(module.ema.module[0]) is type(module.net[0]) is not nn.Conv2d
    assert {p.requires_grad for p in module.ema.parameters()} == {not frozen}
    for _ in range(2):
        module.ema.update_parameters(module.net)
    torch.testing.assert_close(list(module.ema.module.parameters()), list(module.net.parameters()))


def test_a_head_that_stays_dense_stays_so_in_the_copy():
    module = hadamard(Momentum(), keep=lambda path: path == "online.3")
    assert type(module.online[3]) is type(module.target[3]) is nn.Linear
    assert isinstance(module.target[0], HadamardConv2d)


def test_copies_have_no_penalty():
    module = factorize(Momentum(), start="dense")
    alone = sum(layer.mu.abs().sum() for _, layer in factorized_layers(module.online))
    torch.testing.assert_close(l1_norm_of_masks(module), alone)


def test_two_critics_each_have_the_copy_with_their_values():
    module = nn.Module()
    module.q1, module.q2 = network(1), network(2)
    module.t2, module.t1 = (deepcopy(q).requires_grad_(False) for q in (module.q2, module.q1))
    assert {copy.path: copy.original for copy in copies_in(module)} == {"t1": "q1", "t2": "q2"}


def test_what_is_trained_is_no_copy_of_what_is_built_alike():
    module = nn.Module()
    module.twins = nn.ModuleDict({"a": network(), "b": network()})  # the same values, and both may be trained
    assert copies_in(module) == []
    module.held = nn.Sequential(network(1))  # other values
    assert copies_in(module) == []
    module.one, module.other = nn.Sequential(network(2)), nn.Sequential(network(2))  # both held so
    assert copies_in(module) == []
    module.line, module.zero = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))  # zero, as layers of adapters begin
    for layer in (module.line, module.zero[0]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert copies_in(module) == []
    module.average = AveragedModel(network(3))
    assert copies_in(module) == []
    module.net = deepcopy(module.average.module)
    assert [(copy.path, copy.original) for copy in copies_in(module)] == [("average.module", "net")]


class Ema:
    """As diffusers', torch_ema's, and those that many write for themselves."""

    def __init__(self, parameters, kind):
        self.decay, self.collected = 0.5, []
        self.shadow = kind(parameter.detach().clone() for parameter in parameters)


@pytest.mark.parametrize("kind", [list, tuple, lambda tensors: dict(enumerate(tensors))])
@replacements
def test_copies_in_a_plain_object_are_refused(replace, kind):
    module = nn.Module()
    module.net, module.head = network(), nn.Linear(5, 3)
    module.net.averages = Ema(module.net.parameters(), kind)
    with pytest.raises(ConfigError, match=r"^'net.averages', of type Ema, has copies of weights"):
        replace(module)
    module.net.averages = module.net.averages.shadow
    with pytest.raises(ConfigError, match=r"^'net.averages', of type (list|tuple|dict), has copies"):
        replace(module)
    module.net.averages = [*module.parameters()]  # the weights themselves, as an LSTM has its own
    module.net.scale = (torch.zeros(4), torch.ones(4))  # as the batch norm's weight and bias
    replace(module)


def test_frozen_layers_of_a_network_of_equal_layers_are_no_copies():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    layers.layers[0].requires_grad_(False)
    assert copies_in(layers) == []
    module = nn.Module()
    module.first, module.second = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    assert copies_in(module) == []
    assert copies_in(network()) == copies_in(network().requires_grad_(False)) == []
