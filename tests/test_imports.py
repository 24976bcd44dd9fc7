"""Imports run downward only, so that every room can be read without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: from the top; a module imports only from lines below its own, or its own
FLOORS = [
    {"lit_pfl.__main__"},
    {"lit_pfl.cli"},
    {"lit_pfl.testing", "lit_pfl.report"},
    {"lit_pfl"},
    {"lit_pfl.federation", "lit_pfl.links.flower"},
    {"lit_pfl.global_model", "lit_pfl.round_log"},
    {"lit_pfl.methods"},
    {"lit_pfl.methods.two_models"},
    {"lit_pfl.engines.stacked"},
    {"lit_pfl.engines.local", "lit_pfl.engines.stack"},
    {"lit_pfl.engines.frozen", "lit_pfl.engines.trainers"},
    {"lit_pfl.engines.validation", "lit_pfl.engines.client_logger"},
    {"lit_pfl.client"},
    {"lit_pfl.factorization", "lit_pfl.identity", "lit_pfl.sharing", "lit_pfl.engines.threads"},
    {"lit_pfl.evaluation"},
    {"lit_pfl.learners"},
    {"lit_pfl.links"},
    {"lit_pfl.engines.streams"},
    {"lit_pfl.coordinator"},
    {"lit_pfl.engines.last_good"},
    {"lit_pfl.engines"},
    {"lit_pfl.server", "lit_pfl.ledger"},
    {"lit_pfl.deployment"},
    {"lit_pfl.data", "lit_pfl.models", "lit_pfl.export", "lit_pfl.lightning_internals"},
    {"lit_pfl.nn"},
    {"lit_pfl.structures"},
    {"lit_pfl.ops"},
    {"lit_pfl.payload"},
    {"lit_pfl.header"},
    {"lit_pfl.encoding"},
    {"lit_pfl.low_rank", "lit_pfl.draws", "lit_pfl.finite"},
    {"lit_pfl.errors"},
    {"lit_pfl_callbacks"},
]
FILES = [*(ROOT / "lit_pfl").rglob("*.py"), *(ROOT / "callbacks/lit_pfl_callbacks").rglob("*.py")]


def module_of(path: Path) -> str:
    root = ROOT / "callbacks" if path.is_relative_to(ROOT / "callbacks") else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(module: str) -> tuple[int, str]:
    """Return the floor and the room of a module."""
    for depth, rooms in enumerate(FLOORS):
        for room in rooms:
            if module == room or (module.startswith(room + ".") and room != "lit_pfl"):
                return depth, room
    raise AssertionError(f"{module} is on no floor; add it to FLOORS")


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
    module = module_of(path)
    for name in imports(path):
        if name.split(".")[0] in ("lit_pfl", "lit_pfl_callbacks"):
            (here, room), (there, other) = place(module), place(name)
            assert there > here or other == room, f"{module} imports {name} from above"


def test_the_callbacks_need_nothing_of_lit_pfl():
    for path in (ROOT / "callbacks").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "lit_pfl"], path


def test_methods_know_nothing_of_images():
    images = ("torchvision", "kornia", "lit_pfl.learners.classifier")
    for path in (ROOT / "lit_pfl/methods").glob("*.py"):
        for name in imports(path):
            assert not name.startswith(images), f"{path}: {name}"
            assert not name.startswith("lit_pfl.data") or name == "lit_pfl.data.loaders", f"{path}: {name}"
