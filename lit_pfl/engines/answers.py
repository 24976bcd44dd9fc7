"""What comes back from a worker: an answer or an error, and warnings."""

import os
import pickle
import platform
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_pfl.engines.parcels import Parcel, packed, unpacked


class Warned(NamedTuple):
    """A warning, of which Python keeps where it comes from."""

    message: str
    category: type[Warning]
    file: str
    line: int


class Failure(NamedTuple):
    """What went wrong in a worker, and where: an error that can be raised elsewhere."""

    error: Exception
    where: str


def keep_warnings() -> list[Warned]:
    """Return a list that takes this process's warnings from now on, in place of being written where nobody looks."""
    kept: list[Warned] = []

    def keep(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        kept.append(Warned(str(message), _made_of_text(category), filename, lineno))

    warnings.showwarning = keep
    return kept


def _made_of_text(category: type[Warning]) -> type[Warning]:
    """Return a category, or the nearest of those that it is a kind of, that is made of a text alone."""
    try:
        category("")
    except Exception:
        return _made_of_text(category.__base__)  # type: ignore[arg-type]
    return category


def carefully(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a worker's method return an answer, or the :class:`Failure` that came of it, packed with its warnings."""

    def call(self: Any, *args: Any) -> Parcel:
        warned: list[Warned] = self.warned
        try:
            parcel = packed((method(self, *args), warned))
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it holds something that does not travel, or cannot be made again from its arguments
                found = RuntimeError(f"{type(error).__name__}: {error}")
                found.__notes__ = getattr(error, "__notes__", [])
                error = found
            parcel = packed((Failure(error, f"process {os.getpid()} of {platform.node()}"), warned))
        warned.clear()
        return parcel

    return call


def opened(parcel: Parcel, copy: bool, told: set[Warned]) -> Any:
    """Return what is in an answer, and give its warnings here.

    Args:
        parcel: what a method returned :func:`carefully`.
        copy: whether the answer's tensors may be written to.
        told: warnings that have been given, which are not given again; it is added to.

    Raises:
        Exception: what went wrong in the worker.
    """
    answer, warned = unpacked(parcel, copy)
    for one in warned:
        if one not in told:
            told.add(one)
            warnings.warn_explicit(*one)
    if isinstance(answer, Failure):
        answer.error.add_note(f"(in a worker: {answer.where})")
        raise answer.error
    return answer
