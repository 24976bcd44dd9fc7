"""Runs a part of the tests with the lowest and the newest release of Lightning that pyproject.toml allows.

python tests/lightning_versions.py

Each release is installed into a folder of its own, without its dependencies, and found before the one of the present
environment, which has the rest.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
#: what depends most on how Lightning is written
TESTS = ["tests/test_trainers.py", "tests/test_resume.py", "tests/callbacks/test_federated_loop.py"]


def allowed() -> dict[str, str]:
    """Return what to ask an installer for: the lowest allowed release, and the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lightning = next(r for r in map(Requirement, project["dependencies"]) if r.name == "lightning")
    [lowest] = [bound.version for bound in lightning.specifier if bound.operator == ">="]
    return {"lowest": f"lightning=={lowest}", "newest": str(lightning)}


def run(release: str, tests: list[str] = TESTS) -> str:
    """Run tests with a release; return which it was.

    Raises:
        CalledProcessError: when it cannot be installed, or a test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, release]
        subprocess.run(install, check=True)
        path = os.pathsep.join([folder, str(ROOT), str(ROOT / "callbacks"), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": path}
        ask = "import lightning; print(lightning.__version__, lightning.__file__)"
        asked = subprocess.run([sys.executable, "-c", ask], env=environment, check=True, capture_output=True, text=True)
        version, file = asked.stdout.split(maxsplit=1)
        assert file.startswith(folder), f"{file.strip()} is not the release that was installed"
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        subprocess.run(pytest, env=environment, cwd=ROOT, check=True)
    return version


if __name__ == "__main__":
    for which, release in allowed().items():
        print(f"{which} allowed: lightning {run(release)} passes")
