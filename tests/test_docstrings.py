"""Every public method says what it does, itself or by what it overrides."""

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import pytest

import lit_pfl
import lit_pfl_callbacks

#: has docstrings in functions that are called by others of its own
WRAPPED = ("Worker",)


def modules() -> list[str]:
    packages = [lit_pfl, lit_pfl_callbacks]
    return sorted(
        module.name
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )


def methods(kind: type) -> list[str]:
    made = (property, staticmethod, classmethod)
    members = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
    return [name for name, member in members.items() if inspect.isfunction(member) or isinstance(member, made)]


def is_documented(kind: type, name: str) -> bool:
    """Say whether somebody can read what a method is for; those of other libraries say what they like."""
    elsewhere = [base for base in kind.__mro__ if not base.__module__.startswith("lit_pfl")]
    return bool(inspect.getdoc(getattr(kind, name))) or any(name in vars(base) for base in elsewhere)


def is_public(kind: Any, module: str) -> bool:
    """Say whether a class is a module's own; what a protocol asks for is in its own docstring."""
    own = inspect.isclass(kind) and kind.__module__ == module and not kind.__name__.startswith("_")
    return own and not getattr(kind, "_is_protocol", False) and kind.__name__ not in WRAPPED


@pytest.mark.parametrize("name", modules())
def test_methods_have_docstrings(name):
    try:
        module = import_module(name)
    except ImportError as error:
        pytest.skip(str(error))
    for kind in vars(module).values():
        if is_public(kind, name):
            assert not [member for member in methods(kind) if not is_documented(kind, member)], kind
