"""The examples in docstrings and guides are true."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

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


def test_the_guide_to_your_module(monkeypatch, tmp_path):
    """Its blocks are run as one program."""
    guide = (Path(__file__).parent.parent / "docs/your_module.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), "docs/your_module.md", "exec"), {"__name__": "guide"})
