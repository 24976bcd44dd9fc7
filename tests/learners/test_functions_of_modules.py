"""Modules that hold functions which use the module itself: hooks made in its ``__init__``, lambdas, partials."""

import copy
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from learners.test_written_otherwise import METHODS, Plain, trained
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import own_copy
from tiny import assert_equal


class Hooked(Plain):
    """Takes its features, and a penalty, from a hook of one of its layers."""

    def __init__(self, hook: Callable[["Hooked"], Callable[..., Any]]) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.penalties: list[Tensor] = []
        self.body[1].register_forward_hook(hook(self))

    def note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features["relu"] = output
        self.penalties.append(output.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        self.penalties.clear()
        self.body(x)
        return self.head(self.features.pop("relu"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(self.penalties)


def by_method(module: Hooked) -> Callable[..., Any]:
    return module.note


def by_closure(module: Hooked) -> Callable[..., Any]:
    features, penalties = module.features, module.penalties

    def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        features["relu"] = output
        penalties.append(output.square().mean())

    return hook


def by_another(module: Hooked) -> Callable[..., Any]:
    def noted(name: str) -> Callable[..., Any]:
        def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            module.note(layer, name, output)

        return hook

    return noted("relu")


HOOKS = {
    "closure": by_closure,
    "closure of a closure": by_another,
    "lambda": lambda module: lambda *args: module.note(*args),
    "default": lambda module: lambda *args, owner=module: owner.note(*args),
    "partial": lambda module: partial(Hooked.note, module),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_made_inside_of_the_module_trains_as_a_method_does(hook):
    assert_equal(trained("FedAvg", partial(Hooked, hook)), trained("FedAvg", partial(Hooked, by_method)))


@pytest.mark.few(6)
@pytest.mark.parametrize("method", METHODS)
def test_under_every_method(method):
    expected = trained(method, partial(Hooked, by_method))
    assert_equal(trained(method, partial(Hooked, by_closure)), expected)


class Odd(L.LightningModule):
    """Holds functions of many kinds; each computes what ``net`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

        def again(times: int, x: Tensor) -> Tensor:
            return again(times - 1, x) if times else self.net(x)

        def never(x: Tensor) -> Tensor:
            return later if x is None else self.net(x)

        self.functions = {
            "in a list": [lambda x: self.net(x)],
            "calls itself": [partial(again, 3)],
            "names what is not there": [never],
            "weight": [lambda x, w=self.net.weight, b=self.net.bias: nn.functional.linear(x, w, b)],
        }
        self.partial = partial(self.net_of, 1)
        if self is None:
            later = None

    def net_of(self, one: int, x: Tensor) -> Tensor:
        return one * self.net(x)


@pytest.mark.parametrize("kind", [nn.Linear, nn.GRU, nn.TransformerEncoderLayer, MeanMetric])
def test_hooks_of_any_layer_are_made_again(kind):
    module = Odd()
    module.layer = kind(2, 2) if kind is not MeanMetric else kind()
    module.layer.register_forward_hook(lambda *args: setattr(module, "hooked", True))
    copied = own_copy(module)
    copied.layer(torch.ones(1, 2))
    assert copied.hooked
    assert not hasattr(module, "hooked")


def test_every_function_of_a_copy_uses_the_copy():
    module, x = Odd(), torch.ones(2)
    copied = own_copy(module)
    nn.init.ones_(copied.net.weight)
    nn.init.ones_(copied.net.bias)
    functions = [function for some in copied.functions.values() for function in some]
    for function in (*functions, copied.partial):
        assert function(x).tolist() == [3, 3]
    assert module.functions["in a list"][0](x).tolist() != [3, 3]


def test_functions_that_do_not_use_the_module_stay_the_same_objects():
    module, held = Odd(), object()
    module.free = lambda: held
    assert own_copy(module).free is module.free


def test_compiled_parts_make_their_functions_again_themselves():
    module = Odd()
    module.net = torch.compile(module.net, backend="eager")
    copied = own_copy(module)
    nn.init.zeros_(copied.net._orig_mod.weight)
    nn.init.ones_(copied.net._orig_mod.bias)
    assert copied.net(torch.ones(2)).tolist() == [1, 1]


def test_what_a_function_uses_and_cannot_be_copied_is_named():
    module, lock = Odd(), threading.Lock()
    module.locked = lambda x: module.net(x) if lock.locked() else x
    with pytest.raises(ConfigError, match=r"<lambda>\(\): every client needs one of its own, and a lock cannot be co"):
        own_copy(module)


def test_a_python_that_copies_no_functions_is_told(monkeypatch):
    """As ``copy.deepcopy`` of Python 3.14 does."""
    before = copy.deepcopy
    atomic = (FunctionType, weakref.ref)
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: x if type(x) in atomic else before(x, memo))
    with pytest.raises(ConfigError, match=r"<lambda> uses the module, and from Python 3\.14 on its copies would use"):
        own_copy(Hooked(HOOKS["lambda"]))
    assert own_copy(Hooked(by_method)).head is not None


def test_a_part_that_cannot_be_copied_is_named():
    module = Hooked(by_method)
    module.head.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"^Hooked\.head\.lock: every client .*; make it in configure_model\(\)\."):
        own_copy(module)


def test_parameters_keep_hooks_and_attributes():
    module, seen = Odd(), []
    module.net.bias._no_weight_decay = True
    module.handle = module.net.weight.register_hook(lambda gradient: gradient * module.net.bias.detach()[:, None])
    module.net.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight))
    module.net.bias.requires_grad_(False)
    copied = own_copy(module)
    assert copied.net.bias._no_weight_decay
    assert not copied.net.bias.requires_grad
    nn.init.zeros_(copied.net.bias)
    copied.net(torch.ones(2)).sum().backward()
    assert not copied.net.weight.grad.any()
    assert [id(weight) for weight in seen] == [id(copied.net.weight)]
    assert module.net.weight.grad is None
    copied.handle.remove()
    assert module.net.weight._backward_hooks
    assert not copied.net.weight._backward_hooks


def test_functions_and_references_in_plain_objects_use_the_copy():
    whole, module, x = Hooked(by_method), Odd(), torch.ones(2)
    whole.part = module
    module.helper = SimpleNamespace(parts=[SimpleNamespace(net=lambda x: module.net(x))])
    module.cached = lru_cache(maxsize=3)(module.net_of)
    module.references = [weakref.ref(p) for p in module.parameters()], weakref.ref(whole), weakref.ref(module.net)
    module.net.parent, whole.head.other, module.net.other = map(weakref.ref, (module, module.net, whole.head))
    copied_whole = own_copy(own_copy(whole))
    copied = copied_whole.part
    nn.init.ones_(copied.net.weight)
    nn.init.ones_(copied.net.bias)
    for function in (copied.helper.parts[0].net, partial(copied.cached, 1)):
        assert function(x).tolist() == [3, 3]
    assert copied.cached.cache_parameters()["maxsize"] == 3
    weights, own, net = copied.references
    assert [id(weight()) for weight in weights] == [id(p) for p in copied.parameters()]
    assert (own(), net()) == (copied_whole, copied.net)
    assert (copied.net.parent(), copied.net.other()) == (copied, copied_whole.head)
    assert copied_whole.head.other() is copied.net


def test_a_function_that_uses_a_part_with_another_function():
    module = Odd()
    module.net.scale = lambda x: module.net.bias * x
    module.scaled = lambda x, net=module.net: net.scale(x)
    copied = own_copy(module)
    nn.init.zeros_(copied.net.bias)
    assert copied.scaled(3).tolist() == [0, 0]
