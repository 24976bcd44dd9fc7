"""Imports run downward only, so that every room can be read without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: from the ground up; a module imports from its own room, or from one below
FLOORS = [
    ("errors", "ops", "lit_pfl_callbacks"),
    ("randomness", "nn", "lightning_internals", "report"),
    ("models", "data"),
    ("learners",),
    ("core",),
    ("methods", "engines", "export"),
    ("federation", "links"),
    ("cli", "testing", "__init__"),
    ("__main__",),
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = [*(ROOT / "lit_pfl").rglob("*.py"), *(ROOT / "callbacks/lit_pfl_callbacks").rglob("*.py")]


def module_of(path: Path) -> str:
    root = ROOT / "callbacks" if path.is_relative_to(ROOT / "callbacks") else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of a module: what comes first of its name in ``lit_pfl``."""
    first, *rest = module.split(".")
    return first if first == "lit_pfl_callbacks" else (rest or ["__init__"])[0]


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            assert "*" not in [alias.name for alias in node.names], f"{path}: a wildcard import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_imports_run_downward(path):
    room = room_of(module_of(path))
    for name in imports(path):
        if name.split(".")[0] in ("lit_pfl", "lit_pfl_callbacks"):
            other = room_of(name)
            assert other == room or FLOOR[other] < FLOOR[room], f"{module_of(path)} imports {name} from above"


def test_the_callbacks_need_nothing_of_lit_pfl():
    for path in (ROOT / "callbacks").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "lit_pfl"], path


def test_methods_know_nothing_of_images():
    images = ("torchvision", "kornia", "lit_pfl.learners.classifier")
    for path in (ROOT / "lit_pfl/methods").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(images), f"{path}: {name}"
            assert not name.startswith("lit_pfl.data") or name in ("lit_pfl.data.loaders", "lit_pfl.data.batches"), (
                f"{path}: {name}"
            )
