"""The networks of many clients as one, of which a single step trains them all."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lit_pfl.core import Client
from lit_pfl.errors import ConfigError, first_line
from lit_pfl.learners import Step, call_with, size_of
from lit_pfl.randomness import random_state, same_state

#: optimizers that treat every number by itself, so that a stack's step is that of each client in it
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
)
#: what their states hold that counts steps: one number for all of a parameter
COUNTS = ("step", "mu_product")
#: what every module has, none of which is about what it computes
OF_ALL_MODULES = vars(L.LightningModule()).keys()
State = Mapping[str, Any]


@dataclass(frozen=True)
class Epoch:
    """A local epoch that a client's fit hands over.

    Args:
        client: the client.
        optimizer: its optimizer.
        batches: its batches, drawn from its own random numbers.
    """

    client: Client
    optimizer: Optimizer
    batches: list[Any]

    def shapes(self, step: int) -> tuple[torch.Size, ...] | None:
        """Return the shapes of a batch, None where there is none any more."""
        if step >= len(self.batches):
            return None
        return tuple(tensor.shape for tensor in tree_leaves(self.batches[step]))

    def kind(self) -> Hashable:
        """Return what clients have to have in common, since a stack computes all of it as its first member does: what
        their networks are made of, their tensors' shapes, an optimizer's options and its counts.
        """
        learner, groups = self.client.learner, self.optimizer.param_groups
        states = [self.optimizer.state.get(weight, {}) for group in groups for weight in group["params"]]
        return (
            type(self.client),
            tuple((type(part), part.training, tuple(_options(part))) for part in learner.modules()),
            tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in learner.named_parameters()),
            tuple((name, b.shape, b.dtype) for name, b in learner.named_buffers()),
            tuple(str({key: _exact(value) for key, value in group.items() if key != "params"}) for group in groups),
            tuple(tuple((key, float(s[key]) if key in COUNTS else None) for key in s) for s in states),
        )

    def order(self) -> tuple[int, int]:
        """Return the number of batches, and the size of the last."""
        return len(self.batches), size_of(self.batches[-1]) if self.batches else 0


def train_together(epochs: Sequence[Epoch]) -> None:
    """Train clients' epochs, those of one kind in one stack.

    Raises:
        ConfigError: when their network cannot be stacked.
    """
    kinds: dict[Hashable, list[Epoch]] = {}
    for epoch in epochs:
        kinds.setdefault(epoch.kind(), []).append(epoch)
    for alike in kinds.values():
        learner = alike[0].client.learner
        parts, drawn = _parts(learner), random_state()
        Stack.of(alike).train()
        # what a step does to anything else, it does once for all of them
        if changed := [one for one in _parts(learner).items() if one not in parts.items()]:
            raise _cannot_be_stacked("a step changes {!r} of {}".format(*reversed(changed[0][0])))
        if not same_state(drawn, random_state()):
            raise _cannot_be_stacked("a step draws random numbers")


class Stack:
    """Clients that train together: their tensors along a first dimension, as long as their batches are of one shape.

    Args:
        members: their K epochs, of one kind.
        weights: (K, ...) their learners' parameters by name.
        buffers: (K, ...) their learners' buffers by name.
        states: their optimizers' states, by the name of the parameter: (K, ...), or a count that they share.
    """

    def __init__(
        self,
        members: Sequence[Epoch],
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        states: Mapping[str, State],
    ) -> None:
        self.members, self.buffers = members, buffers
        learner, optimizer = members[0].client.learner, members[0].optimizer
        own = dict(learner.named_parameters())
        self.weights = {name: weights[name].detach().requires_grad_(own[name].requires_grad) for name in own}
        stacked = {id(weight): self.weights[name] for name, weight in own.items()}
        kind: Any = type(optimizer)
        self.optimizer: Optimizer = kind(
            [{**group, "params": [stacked[id(w)] for w in group["params"]]} for group in optimizer.param_groups]
        )
        self.optimizer.state.update({self.weights[name]: dict(state) for name, state in states.items()})
        self._objective = Step(learner, members[0].client.loss)

    @classmethod
    @torch.no_grad()
    def of(cls, epochs: Sequence[Epoch]) -> Self:
        """Return a stack of copies of clients' tensors; :meth:`train` puts them back."""
        members = sorted(epochs, key=Epoch.order, reverse=True)  # those who train on stay side by side
        learners = [member.client.learner for member in members]
        own = [dict(learner.named_parameters()) for learner in learners]
        weights = {name: torch.stack([tensors[name] for tensors in own]) for name in own[0]}
        also = [dict(learner.named_buffers()) for learner in learners]
        buffers = {name: torch.stack([tensors[name] for tensors in also]) for name in also[0]}
        states = {}
        for name in own[0]:
            found = [m.optimizer.state.get(tensors[name], {}) for m, tensors in zip(members, own, strict=True)]
            states[name] = _each(found[0], lambda key, _, found=found: torch.stack([state[key] for state in found]))
        return cls(members, weights, buffers, states)

    def train(self, step: int = 0) -> None:
        """Train from a step of the epoch to its end, and give the clients what has come of it.

        Raises:
            ConfigError: when the network cannot be stacked.
        """
        while True:
            shapes = [member.shapes(step) for member in self.members]
            if shapes[0] is None:  # nor have the others a batch any more
                self._put_back()
                return
            if len(set(shapes)) > 1:
                start = 0
                for _, same in groupby(shapes):
                    end = start + len(list(same))
                    self._part(slice(start, end)).train(step)
                    start = end
                return
            self._step(step)
            step += 1

    def _step(self, step: int) -> None:
        batches = [member.batches[step] for member in self.members]
        stacked = tree_map(lambda *tensors: torch.stack(tensors), *batches)
        try:
            losses = vmap(self._loss, (0, 0, 0, None), randomness="error")(self.weights, self.buffers, stacked, step)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise _cannot_be_stacked(first_line(error)) from error
        losses.sum().backward()  # which gives each client the gradient of its own
        self.optimizer.step()
        self.optimizer.zero_grad()
        for member, batch, loss in zip(self.members, batches, losses.detach().unbind(), strict=True):
            member.client.note_loss(loss, size_of(batch))

    def _loss(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, step: int) -> Tensor:
        tensors = {f"learner.{name}": tensor for name, tensor in (*weights.items(), *buffers.items())}
        return call_with(tensors, self._objective, batch, step, keeps=True)

    def _part(self, some: slice) -> "Stack":
        """Return a stack of some of the clients, in the same memory."""
        return Stack(
            self.members[some],
            {name: weight.detach()[some] for name, weight in self.weights.items()},
            {name: buffer[some] for name, buffer in self.buffers.items()},
            {name: _each(self._state(name), lambda _, value: value[some]) for name in self.weights},
        )

    @torch.no_grad()
    def _put_back(self) -> None:
        for k, member in enumerate(self.members):
            for name, buffer in member.client.learner.named_buffers():
                buffer.copy_(self.buffers[name][k])
            for name, weight in member.client.learner.named_parameters():
                weight.copy_(self.weights[name][k])
                member.optimizer._opt_called = True  # type: ignore[attr-defined]  # which schedules look at
                if state := self._state(name):
                    member.optimizer.state[weight] = _each(state, lambda _, value, k=k: value[k].clone())

    def _state(self, name: str) -> State:
        return self.optimizer.state.get(self.weights[name], {})


def _cannot_be_stacked(why: str) -> ConfigError:
    return ConfigError(
        f"federation.engine=Stacked: this network cannot be trained for many clients at once ({why}); use "
        "federation.engine=Local."
    )


def _parts(learner: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Return what the parts of a network have next to their tensors, by the part's name and the attribute's."""
    return {
        (name or type(learner).__name__, attribute): value
        for name, part in learner.named_modules()
        for attribute, value in _options(part)
    }


def _options(part: nn.Module) -> list[tuple[str, Hashable]]:
    return [(name, _told(value)) for name, value in vars(part).items() if name not in OF_ALL_MODULES]


def _told(value: Any) -> Hashable:
    """Return what two values have in common that are equal: tensors that are the same, arrays with the same numbers."""
    leaves = tree_leaves(value)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return id(value)
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):  # whose text leaves some of their numbers out
        return tuple((x.shape, x.tobytes()) if isinstance(x, np.ndarray) else str(x) for x in leaves)
    return repr(value)  # also of NumPy's generators, each of which is its own


def _exact(option: Any) -> Any:
    """Return an optimizer's option such that its text holds all its digits, which a tensor's does not."""
    return option.tolist() if isinstance(option, Tensor) else option


def _each(state: State, change: Any) -> dict[str, Any]:
    """Return an optimizer's state of a parameter with its tensors changed, given by name; what counts is copied."""
    return {
        key: (value.clone() if isinstance(value, Tensor) else value) if key in COUNTS else change(key, value)
        for key, value in state.items()
    }
