"""Copies of modules that share nothing with them."""

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import lightning as L
from torch import Tensor, nn

from lit_pfl.errors import ConfigError

M = TypeVar("M", bound=L.LightningModule)
CONTAINERS = partial | dict | list | tuple | set | frozenset
CACHED = type(lru_cache(int))
#: where a tensor has its hooks
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _looks_up_functions() -> bool:
    """Say whether ``deepcopy`` looks functions up in its memo. From Python 3.14 on it takes them as they are."""
    return copy.deepcopy(_looks_up_functions, {id(_looks_up_functions): True}) is True


def own_copy(module: M) -> M:
    """Return a copy that shares nothing with the module but factories, which may hold all of a command line's parser.

    A function that was made inside of a method and uses the module, such as a hook, is made again for the copy, and so
    is a weak reference to it or to one of its tensors. Parameters keep their hooks and their attributes.

    Args:
        module: a module; a Trainer that has it already is the copy's too. Whatever it made in its ``__init__`` is
            copied: sets, tensors, loss modules, metrics.

    Raises:
        ConfigError: when it holds something that cannot be copied, or a part whose copies have a parameter of their
            own that it shares with the rest, as TorchRL's losses; from Python 3.14 on also for such a function.
    """
    made = module.__class__.__new__(module.__class__)
    known = _Known({id(module): made, id(module._trainer): module._trainer})
    parts = [part for part in module.modules() if "_orig_mod" not in part._modules]  # compiled ones copy themselves
    values = [value for part in parts for value in part.__dict__.values()]
    parameters = [x for part in parts for x in part._parameters.values() if x is not None]
    values += [value for x in parameters for value in (*vars(x).values(), *(getattr(x, name) for name in HOOKS))]
    # what a module has computed and keeps, an embedding for instance: without its graph, which cannot be copied
    known |= {id(x): x.detach().clone() for x in values if isinstance(x, Tensor) and not x.is_leaf}
    owned = _owned(parts, values)
    factories = (x for x in _reached([module.__dict__]) if isinstance(x, FunctionType | partial))
    known |= {id(factory): factory for factory in factories if not _uses(factory, owned)}
    kept = dict(known)
    _make_again(list(_reached(values, known)), owned, known)
    try:
        made.__dict__ = copy.deepcopy(module.__dict__, known)
        for parameter in parameters:  # of which PyTorch's copies are without attributes and hooks
            if (copied := known.get(id(parameter))) is None:
                continue  # of a part that copies itself, such as a ScriptModule
            vars(copied).update(copy.deepcopy(vars(parameter), known))
            for name in HOOKS:
                if hooks := getattr(parameter, name):
                    setattr(copied, name, copy.deepcopy(hooks, known))
    except (TypeError, RuntimeError) as error:
        raise _uncopied(module, kept, error) from None
    _check_shared(module, made)
    return made


def _check_shared(module: M, made: M) -> None:
    """See that a copy has one tensor where the module has one under several names."""
    first: dict[int, str] = {}
    copied = dict(made.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        former = first.setdefault(id(parameter), name)
        if copied.get(name) is not copied.get(former):
            raise ConfigError(
                f"{type(module).__name__}: every client needs one of its own, and in a copy {former} and {name} are no "
                "longer one tensor; make both in configure_model(). Methods with a second model per client cannot have "
                "them."
            )


class _Known(dict[int, Any]):
    """What has been copied, by the id of the original, as ``deepcopy`` keeps it.

    Attributes:
        makers: make what needs the copy of something else, once it is asked for.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__(known)
        self.makers: dict[int, Callable[[], Any]] = {}

    def get(self, key: int, default: Any = None) -> Any:
        if key in self.makers and key not in self:
            made = self.makers[key]()
            self.setdefault(key, made)  # which it may have asked for itself
        return super().get(key, default)


def _uncopied(module: L.LightningModule, kept: Mapping[int, Any], error: Exception) -> ConfigError:
    """Return an error that names the attribute that cannot be copied; what is kept as it is does not count."""
    others = {**kept, **{id(part): part for part in module.modules()}}  # which are looked at by themselves
    parts = dict(module.named_modules())
    hooks = dict.fromkeys(parts, "configure_model")
    if hasattr(module, "configure_state"):  # a method's, not its learner's
        hooks |= {path: "configure_state" for path in parts if path.split(".")[0] != "learner"}
    for path, part in parts.items():
        for attribute, value in vars(part).items():
            try:
                copy.deepcopy(value, dict(others))
            except (TypeError, RuntimeError) as found:
                name = ".".join(filter(None, (type(module).__name__, path, attribute)))
                return _cannot(name, value, found, hooks[path])
    for path in reversed([path for path in parts if path]):  # one that nothing of is to blame, but its class
        try:
            copy.deepcopy(parts[path], dict(kept))
        except (TypeError, RuntimeError) as found:
            return _cannot(f"{type(module).__name__}.{path}", parts[path], found, hooks[path])
    return _cannot(type(module).__name__, module, error, "configure_model")


def _cannot(name: str, value: Any, error: Exception, hook: str) -> ConfigError:
    return ConfigError(
        f"{name}: every client needs one of its own, and a {type(value).__name__} cannot be copied ({error}); "
        f"make it in {hook}()."
    )


# ------------------------------------------------------------------------ functions that use the module that made them


def _reached(values: Iterable[Any], known: Mapping[int, Any] | None = None) -> Iterator[Any]:
    """Yield the functions, partials and weak references in nested containers.

    Args:
        values: where to begin.
        known: what need not be looked into; if given, plain objects are looked into too.
    """
    into_objects, rest, seen = known is not None, list(values), set(known or ())
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor | nn.Module | L.Trainer | type | ModuleType | str | int | float | None):
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType | partial | CACHED | weakref.ref):
            yield value
        if isinstance(value, CONTAINERS):
            rest += _used_by(value)
        elif into_objects and isinstance(value, MethodType):
            rest.append(value.__self__)
        elif into_objects and not isinstance(value, FunctionType):
            rest += getattr(value, "__dict__", {}).values()


def _owned(parts: Sequence[nn.Module], values: Sequence[Any]) -> set[int]:
    """Return the ids of what a copy has of its own: modules, tensors and containers."""
    tensors = (x for part in parts for own in (part._parameters, part._buffers) for x in own.values())
    containers = (x for x in values if isinstance(x, Tensor | dict | list | set))
    return {id(x) for x in chain(parts, tensors, containers) if x is not None}


def _used_by(value: Any) -> Collection[Any]:
    """Return what a function, or a part of what it uses, is made of."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, CACHED):
        return [value.__wrapped__]
    if isinstance(value, weakref.ref):
        return [value()]
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


def _make_again(reached: Iterable[Any], owned: set[int], known: _Known) -> None:
    """Make what uses a module again, so that it uses the copy, and the functions that these use.

    Args:
        reached: functions, partials, functions with a cache, and weak references.
        owned: see :func:`_owned`.
        known: what has been copied, by the id of the original; what is made is added.
    """
    using = [value for value in reached if _uses(value, owned)]
    if using and not _looks_up_functions():
        name = getattr(using[0], "__qualname__", type(using[0]).__name__)
        raise ConfigError(
            f"model.learner: {name} uses the module, and from Python 3.14 on its copies would use the original; make "
            "it a method, or use an older Python."
        )
    functions = {id(value): value for value in _functions_in(using, owned)}
    # first all of them, empty: whatever is copied to fill one may hold another
    cells = {key: tuple(CellType() for _ in one.__closure__ or ()) for key, one in functions.items()}
    for key, one in functions.items():
        known[key] = FunctionType(one.__code__, one.__globals__, one.__name__, closure=cells[key])
    for value in using:
        if isinstance(value, CACHED):
            known.makers[id(value)] = partial(_cached_again, value, known)
        elif isinstance(value, weakref.ref) and not isinstance(value, weakref.WeakMethod):
            known.makers[id(value)] = partial(_referred_again, value, known)
    for key, one in functions.items():
        made, name = known[key], f"{one.__qualname__}()"
        made.__dict__.update(one.__dict__)
        made.__defaults__ = _copied(name, one.__defaults__, known)
        made.__kwdefaults__ = _copied(name, one.__kwdefaults__, known)
        for cell, former in zip(cells[key], one.__closure__ or (), strict=True):
            if former != CellType():
                cell.cell_contents = _copied(name, former.cell_contents, known)


def _cached_again(function: Any, known: _Known) -> Any:
    return lru_cache(**function.cache_parameters())(copy.deepcopy(function.__wrapped__, known))


def _referred_again(reference: Any, known: _Known) -> Any:
    return weakref.ref(copy.deepcopy(reference(), known))


def _functions_in(values: Iterable[Any], owned: set[int]) -> Iterator[FunctionType]:
    """Yield those functions among some values, and used by them, that use a module."""
    rest, seen = list(values), set()
    while rest:
        value = rest.pop()
        if id(value) in seen or id(value) in owned:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType) and _uses(value, owned):
            yield value
        rest += _used_by(value)


def _copied(name: str, value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except (TypeError, RuntimeError) as error:
        raise _cannot(name, value, error, "configure_model") from None
