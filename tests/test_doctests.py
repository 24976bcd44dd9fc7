"""The examples in docstrings and guides are true."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lit_pfl
import lit_pfl_callbacks

ROOT = Path(__file__).parent.parent
MODULES = [
    module.name
    for package in (lit_pfl, lit_pfl_callbacks)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring(name):
    if name.startswith("lit_pfl.links.flower"):
        pytest.importorskip("flwr")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", ["your_module", "your_data", "your_method", "existing_project"])
def test_guide(name, monkeypatch, tmp_path):
    """Its blocks are run as one program."""
    guide = (ROOT / f"docs/{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), f"docs/{name}.md", "exec"), {"__name__": "guide"})


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    method, tutorial = ((tmp_path / f"{page}.html").read_text() for page in ("methods/SimFed", "tutorial"))
    assert "What a client sends" in method
    assert "After the last round, on test data" in tutorial  # what its command printed
    assert len(list((tmp_path / "_images").glob("tutorial_*.svg"))) == 2
