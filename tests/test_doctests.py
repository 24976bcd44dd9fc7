"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import lit_pfl
import lit_pfl_callbacks

MODULES = [
    module.name
    for package in (lit_pfl, lit_pfl_callbacks)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
