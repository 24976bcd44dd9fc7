"""Copies of modules that share nothing with them."""

import copy
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import lightning as L
from torch import Tensor, nn

from lit_pfl.errors import ConfigError

M = TypeVar("M", bound=L.LightningModule)


def own_copy(module: M) -> M:
    """Return a copy that shares nothing with the module but factories, which may hold all of a command line's parser.

    A function that was made inside of a method and uses the module, such as a hook, is made again for the copy.

    Args:
        module: a module; a Trainer that has it already is the copy's too. Whatever it made in its ``__init__`` is
            copied: sets, tensors, loss modules, metrics.

    Raises:
        ConfigError: when it holds something that cannot be copied.
    """
    made = module.__class__.__new__(module.__class__)
    known: dict[int, Any] = {id(module): made, id(module._trainer): module._trainer}
    parts = [part for part in module.modules() if "_orig_mod" not in part._modules]  # compiled ones copy themselves
    values = [value for part in parts for value in part.__dict__.values()]
    # what a module has computed and keeps, an embedding for instance: without its graph, which cannot be copied
    known |= {id(x): x.detach().clone() for x in values if isinstance(x, Tensor) and not x.is_leaf}
    owned = _owned(parts, values)
    known |= {id(factory): factory for factory in _callables(module.__dict__) if not _uses(factory, owned)}
    for function in _callables(values):
        if isinstance(function, FunctionType) and _uses(function, owned):
            _make_again(function, owned, known)
    made.__dict__ = {name: _copied(f"{type(module).__name__}.{name}", x, known) for name, x in module.__dict__.items()}
    return made


def _copied(name: str, value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{name}: every client needs one of its own, and a {type(value).__name__} cannot be copied ({error}); "
            "make it in configure_state()."
        ) from None


# ------------------------------------------------------------------------ functions that use the module that made them


def _callables(value: Any) -> Iterator[Any]:
    """Return the functions and partials in nested containers; what holds something else is not looked into."""
    if isinstance(value, FunctionType | partial):
        yield value
    if isinstance(value, partial | dict | list | tuple | set | frozenset):
        for part in _used_by(value):
            yield from _callables(part)


def _owned(parts: Sequence[nn.Module], values: Sequence[Any]) -> set[int]:
    """Return the ids of what a copy has of its own: modules, tensors and containers."""
    tensors = (x for part in parts for own in (part._parameters, part._buffers) for x in own.values())
    containers = (x for x in values if isinstance(x, Tensor | dict | list | set))
    return {id(x) for x in (*parts, *tensors, *containers) if x is not None}


def _used_by(value: Any) -> Collection[Any]:
    """Return what a function, or a part of what it uses, is made of."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _uses(value: Any, owned: set[int], seen: set[int] | None = None) -> bool:
    """Say whether a function uses something of a module, itself or by way of another."""
    seen = set() if seen is None else seen
    if id(value) in owned:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_uses(part, owned, seen) for part in _used_by(value))


def _make_again(function: FunctionType, owned: set[int], known: dict[int, Any]) -> None:
    """Make a function again that uses copies, and those that it uses.

    Args:
        function: the function.
        owned: see :func:`_owned`.
        known: what has been copied, by the id of the original; the new function is added.
    """
    if id(function) in known:
        return
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells)
    known[id(function)] = made
    for used in _used_by(function):
        for inner in _callables(used):
            if isinstance(inner, FunctionType) and _uses(inner, owned):
                _make_again(inner, owned, known)
    name = f"{function.__qualname__}()"
    made.__dict__.update(function.__dict__)
    made.__defaults__ = _copied(name, function.__defaults__, known)
    made.__kwdefaults__ = _copied(name, function.__kwdefaults__, known)
    for cell, former in zip(cells, function.__closure__ or (), strict=True):
        if former != CellType():
            cell.cell_contents = _copied(name, former.cell_contents, known)
