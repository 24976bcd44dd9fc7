"""The commands of the README and the documentation are accepted as they stand, in an empty folder."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from cli.typed import ROOT, typed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: what a page stands for with these words is somebody's own
OWN = re.compile(r"\.\.\.|\$|\bRUN\b|runs/|\b(?:cell|my)\.yaml")


def commands() -> list[str]:
    """Return the pages' commands ``lit-pfl fit``, one line each, without those for files of one's own."""
    blocks = (
        block
        for page in PAGES
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    parts = (part.strip() for line in lines for part in line.partition(" #")[0].split("&&"))
    return sorted({part for part in parts if part.startswith("lit-pfl fit") and not OWN.search(part)})


@pytest.fixture
def my_project(monkeypatch, tmp_path):
    """What the guides have a reader put into ``my_project.py``, and the examples of the repository."""
    guides = [(ROOT / f"docs/{name}.md").read_text() for name in ("your_module", "your_method")]
    blocks = [re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL) for guide in guides]
    own = [blocks[0][0], *(block for block in blocks[1] if re.search("^class ", block, re.MULTILINE))]
    Path("my_project.py").write_text("\n".join(own))
    Path("FOLDER").mkdir()
    for folder in (tmp_path, ROOT):
        monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("my_project", None)


@pytest.mark.parametrize("command", commands())
def test_command(command, capsys, my_project):
    came = typed(capsys, *shlex.split(command)[1:], "--print_config")
    assert (came.code, came.errors) == (0, [])


def test_there_are_such_commands():
    assert len(commands()) >= 30
