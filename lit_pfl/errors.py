"""The ways in which something from outside can be wrong."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from numbers import Number
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {operator.gt: "above", operator.ge: "from", operator.lt: "below", operator.le: "up to"}


class ConfigError(ValueError):
    """An option is wrong. The message names it and says what would be right.

    Args:
        message: put on one line: it may quote another library's error of several.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines() if line.strip()))


class UploadError(ValueError):
    """An upload cannot be used. The message names the client and the tensor.

    Args:
        message: what is wrong.
        tensor: name of the tensor that is wrong, if it is one.

    Attributes:
        client: whose upload it is, once it has been refused.
    """

    client: int | None = None

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class LateUpload(UploadError):
    """An upload that comes after its round has ended."""


class PayloadError(ValueError):
    """Bytes are no payload, or not the one that is expected.

    Args:
        message: what is wrong.
        tensor: name of the tensor that is wrong, if it is one.
    """

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class SaveError(OSError):
    """A file cannot be written. The message names it, and says what is left."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_options_of(thing: object, prefix: str) -> None:
    """See that a thing's options are what its constructor's annotations say, as the command line does.

    Looked at are those that are words of a list (``Literal``) or numbers in a range, and attributes of the same name.

    Args:
        thing: the thing.
        prefix: where its options are, for the error.

    Raises:
        ConfigError: when one is something else.
    """
    for name, kinds in _annotated(type(thing)).items():  # type: ignore[arg-type]  # classes have hashes
        value: Any = vars(thing).get(name, ...)
        # an attribute may also be what the constructor has made of the option
        if not isinstance(value, str | Number | list | dict | None) or any(_is_of(value, kind) for kind in kinds):
            continue
        words = [str(word) for kind in kinds for word in get_args(kind)]
        raise ConfigError(
            f"{prefix}.{name}={value!r}: " + (f"choose {', '.join(words)}." if words else f"give a {_range(kinds[0])}.")
        )


def _range(kind: Any) -> str:
    """Return which numbers are in a range of jsonargparse."""
    limits = " and ".join(f"{_WORDS.get(compare, compare.__name__)} {limit}" for compare, limit in kind._restrictions)
    return f"{'whole ' if kind._type is int else ''}number {limits}"


@cache
def _annotated(kind: type) -> dict[str, list[Any]]:
    """Return which words or numbers the options of a class may be; those that may be something else are left out."""
    found: dict[str, list[Any]] = {}
    for base in reversed(kind.__mro__):
        make: Any = base.__dict__.get("__init__")
        hints: dict[str, Any] = {}
        with suppress(NameError, TypeError, AttributeError):  # of names that are imported for type checkers alone
            hints = get_type_hints(make) if make else {}
        for name, hint in hints.items():
            kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
            none = NoneType in kinds or getattr(signature(make).parameters.get(name), "default", ...) is None
            kinds = [one for one in kinds if one is not NoneType]
            found.pop(name, None)
            if kinds and all(get_origin(one) is Literal or hasattr(one, "_restrictions") for one in kinds):
                found[name] = kinds + [NoneType] * none
    return found


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if value is None or kind is NoneType:
        return value is None and kind is NoneType
    try:
        kind(getattr(value, "item", lambda: value)())  # also numpy's numbers, and tensors of one
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def refuse_other_lightning(option: str, thing: object, kind: str) -> None:
    """See that an object is not of ``pytorch_lightning``, a package that has Lightning's classes once more.

    Args:
        option: where it was given.
        thing: the object.
        kind: which of Lightning's classes it should be of.

    Raises:
        ConfigError: when it is.
    """
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in type(thing).__mro__):
        raise ConfigError(
            f"{option}: {type(thing).__name__} is made with pytorch_lightning, whose classes do not mix with those of "
            f"lightning; write `import lightning as L` and L.{kind}. Of a library that you cannot change, see "
            "'Libraries that import pytorch_lightning' in docs/existing_project.md."
        )


@contextmanager
def within_memory(option: str) -> Iterator[None]:
    """Make tensors whose size an option decides.

    Args:
        option: the option, with its value.

    Raises:
        ConfigError: when there is not enough memory for them.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # what PyTorch raises, depending on how large it is
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in ("allocate", "verflow")):
            raise
        raise ConfigError(
            f"{option}: there is not enough memory for tensors of that size; set a smaller number."
        ) from None
