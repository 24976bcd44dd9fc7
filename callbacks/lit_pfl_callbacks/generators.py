"""The generators of random numbers that a loader has of its own: find them, and keep, restore or seed their states."""

import random
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyType

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_pfl_callbacks.sampler_state import SamplerState

KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
#: how many objects are looked at, and how many entries a container has at most that is looked into: not samples
OBJECTS, ENTRIES = 2_000, 100
#: stands for the kind of a sampler's state
SAMPLER = "sampler"
#: what leads to all of a project, and what has no parts
CLOSED = (
    *(L.LightningModule, L.Trainer, L.Callback),
    *(ModuleType, type, Tensor, np.ndarray, str, bytes, int, float, complex, type(None), ProxyType),
)


class OwnGenerators:
    """The generators that a loader, or anything that it is made of, has of its own.

    They order samples, as in ``DataLoader(generator=...)``, or change them, as in random transforms of MONAI and
    Albumentations. Samplers of somebody's own are among them, with the order that they shuffle in place. They are
    looked for in attributes, containers and functions, without calling anything; the default generators of PyTorch,
    NumPy and Python are not among them.

    Args:
        loader: the loader, or anything else.
    """

    def __init__(self, loader: Any) -> None:
        # samplers last, which checkpoints from before do not have
        self._generators = sorted(_found(loader), key=lambda one: isinstance(one, SamplerState))
        #: their states when this was made
        self.initial = self.states()

    def states(self) -> list[Any]:
        """Return their states; of NumPy's with arrays, see :func:`plain`."""
        return [_state(generator) for generator in self._generators]

    def restore(self, states: list[Any]) -> None:
        """Restore states of :meth:`states`, unless they are of other kinds of generators: of another loader."""
        kinds, n = [*map(_kind, self.initial)], len(states)
        if [*map(_kind, states)] == kinds[:n] and {*kinds[n:]} <= {SAMPLER}:
            for generator, state in zip(self._generators, states, strict=False):
                _set_state(generator, state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put their states back afterwards."""
        before = self.states()
        try:
            yield
        finally:
            self.restore(before)

    @property
    def have_drawn(self) -> bool:
        """Whether one of them has drawn anything since this was made."""
        return [*map(_plain_text, self.states())] != [*map(_plain_text, self.initial)]

    @contextmanager
    def fixed(self, seed: int) -> Iterator[None]:
        """Seed them for a while, and put their states back."""
        with self.kept():
            for generator in self._generators:
                _seed(generator, seed)
            yield

    @property
    def ids(self) -> set[int]:
        """What distinguishes these generators from others that are there."""
        return {*map(id, self._generators)}

    def begin_apart(self, client: int, shared: Container[int] | None = None) -> None:
        """Let a client begin with states of its own of those generators that other clients have too.

        Args:
            client: its id, which with a generator's state decides where it begins.
            shared: the ids of such generators; by default all are shared.
        """
        with self.kept():
            for generator in self._generators:
                if shared is None or id(generator) in shared:
                    _seed(generator, _number(client, _state(generator)))
            self.initial = self.states()


def _found(loader: Any) -> Iterator[Any]:
    """Yield generators, nearest first."""
    classes: dict[type, tuple[list[Any], list[Any]]] = {}
    seen, waiting = {id(loader): loader}, deque([loader])  # the objects too, since an id may be used again
    while waiting:
        holder = waiting.popleft()
        if issubclass(type(holder), KINDS):
            if not _is_default(holder):
                yield holder
            continue
        if (state := SamplerState.of(holder)) is not None:
            yield state
        for part in (*_parts(holder), *_attributes(holder, classes)):
            # its type, since a proxy may say that it is of another, or raise
            if id(part) not in seen and not issubclass(type(part), CLOSED) and len(seen) < OBJECTS:
                seen[id(part)] = part
                waiting.append(part)


def _is_default(generator: Any) -> bool:
    """Say whether it is one of the process's own, or of the operating system, which has no state."""
    defaults = torch.default_generator, *torch.cuda.default_generators, np.random.rand.__self__, random.random.__self__  # type: ignore[attr-defined]
    return any(generator is one for one in defaults) or isinstance(generator, random.SystemRandom)


def _parts(holder: Any) -> Iterator[Any]:
    """Yield what a container holds, and what a function was given."""
    kind = type(holder)
    for base, entries in ((dict, dict.values), (list, list.__iter__), (tuple, tuple.__iter__)):
        if issubclass(kind, base) and base.__len__(holder) <= ENTRIES:
            yield from entries(holder)  # and not what a lazy kind of dict would load
    if issubclass(kind, partial):
        yield from (holder.func, holder.args, holder.keywords)
    elif kind is MethodType:
        yield holder.__self__
    elif kind is FunctionType:
        yield from (holder.__defaults__, holder.__kwdefaults__)
        yield from (cell.cell_contents for cell in holder.__closure__ or () if cell != CellType())


def _attributes(holder: Any, classes: dict[type, tuple[list[Any], list[Any]]]) -> Iterator[Any]:
    """Yield what an object and its classes have under names, without running the code of a property."""
    with suppress(AttributeError, TypeError):  # it has none
        yield from [*object.__getattribute__(holder, "__dict__").values()]
    kind = type(holder)
    if kind not in classes:
        written = [vars(one) for one in kind.__mro__]
        slots = [x for of in written if "__slots__" in of for x in of.values() if isinstance(x, MemberDescriptorType)]
        classes[kind] = slots, [x for of in written for x in of.values() if isinstance(x, KINDS)]
    slots, generators = classes[kind]
    yield from generators
    for slot in slots:
        with suppress(AttributeError):  # an empty one
            yield slot.__get__(holder)


def plain(states: Any) -> Any:
    """Return states with lists for arrays, which a checkpoint may not hold."""
    match states:
        case dict():
            return {name: plain(value) for name, value in states.items()}
        case list():
            return [plain(value) for value in states]
        case np.ndarray() | np.generic():
            return states.tolist()
    return states


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case random.Random():
            return generator.getstate()
        case _:
            return generator.get()


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state.cpu())
        case np.random.Generator():
            generator.bit_generator.state = _of_numpy(state)
        case np.random.RandomState():
            generator.set_state(_of_numpy(state))
        case random.Random():
            generator.setstate(state)
        case _:
            generator.set(state)


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            state: Any = generator.get_state(legacy=False)
            fresh = getattr(np.random, state["bit_generator"])(seed).state
            generator.set_state({**state, **fresh, "has_gauss": 0, "gauss": 0.0})
        case random.Random():
            generator.seed(seed)


def _number(client: int, state: Any) -> int:
    """Return a seed, of 63 bits, that is a client's own where a generator has a state."""
    return int.from_bytes(sha256(f"{client} {_plain_text(state)}".encode()).digest()[:8]) >> 1


def _plain_text(state: Any) -> str:
    return repr(state.tolist() if isinstance(state, Tensor) else plain(state))


def _kind(state: Any) -> Any:
    return state.get("bit_generator", SAMPLER) if isinstance(state, dict) else type(state)


def _of_numpy(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _of_numpy(value) for name, value in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state
