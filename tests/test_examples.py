"""The examples run, and do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_an_existing_project_is_federated():
    accuracies = runpy.run_path(str(EXAMPLES / "existing_project.py"))["main"](epochs=8)
    assert len(accuracies) == 4
    assert min(accuracies) > 0.7


def test_a_new_method():
    assert runpy.run_path(str(EXAMPLES / "new_method.py"))["main"](rounds=2) > 0.1
