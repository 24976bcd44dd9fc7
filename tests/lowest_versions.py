"""Runs the tests with the lowest release of everything that pyproject.toml allows.

python tests/lowest_versions.py [ARGUMENTS OF PYTEST]

The releases are installed into a virtual environment of its own, which takes some gigabytes and minutes.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
#: what the tests run on, and the extras that they look at; that for ONNX needs a later PyTorch: its tests are skipped
RUNNERS, EXTRAS = ("hypothesis", "pytest", "pytest-xdist"), ("report", "tensorboard")


def lowest() -> list[str]:
    """Return what to ask an installer for: of every dependency the lowest release that is allowed.

    Raises:
        ValueError: when a dependency has no lowest release.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    runners = [r for r in optional["dev"] if Requirement(r).name in RUNNERS]
    releases = []
    for text in [*project["dependencies"], *(r for extra in EXTRAS for r in optional[extra]), *runners]:
        asked = Requirement(text)
        bounds = [bound.version for bound in asked.specifier if bound.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"pyproject.toml: {text}: give the lowest release that will do, by >=.")
        extras = f"[{','.join(asked.extras)}]" if asked.extras else ""
        releases.append(f"{asked.name}{extras}=={bounds[0]}")
    return releases


def run(arguments: Sequence[str]) -> int:
    """Run pytest with the lowest releases, and return its exit code.

    Raises:
        CalledProcessError: when they cannot be installed together.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "setuptools", *lowest()], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])}
        return subprocess.run([python, "-m", "pytest", *arguments], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
