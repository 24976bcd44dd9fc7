"""Blocks of a page that are run when the site is built, with what came out below them.

    ```{run} sh
    lit-pfl compare --methods FedPer StandAlone --config short
    ```

The blocks of a page run in order, in one folder that is empty at first: ``sh`` by bash, ``python`` as parts of one
program. A block that fails ends the build. Options: ``start-at``, to show what was printed from the line that begins
so; ``picture``, a file that the block has written, and ``alt``, its description.
"""

import contextlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

#: pictures, as a folder of the documentation; git ignores it
PICTURES = "made"


def run_sh(code: str, folder: Path) -> str:
    """Run commands, and return what they print.

    Raises:
        RuntimeError: when one fails.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def run_python(code: str, folder: Path, names: dict[str, Any]) -> str:
    """Run a part of a program, and return what it prints.

    Args:
        code: the part.
        folder: where it runs.
        names: what earlier parts have defined; grows.

    Raises:
        RuntimeError: when it fails.
    """
    printed = io.StringIO()
    logging.disable(logging.WARNING)  # what libraries say of themselves is no output of the page
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(code, "a block", "exec"), names)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None
    finally:
        logging.disable(logging.NOTSET)
    return printed.getvalue()


class Run(SphinxDirective):
    """A block that is run."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "start-at": directives.unchanged_required,
        "picture": directives.unchanged_required,
        "alt": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Run the block; return it, what it printed and its picture."""
        [language] = self.arguments
        code = "\n".join(self.content)
        held = self.env.temp_data  # of this page
        if "run_blocks_folder" not in held:
            held["run_blocks_folder"] = tempfile.TemporaryDirectory()
        folder = Path(held["run_blocks_folder"].name)
        try:
            if language == "sh":
                printed = run_sh(code, folder)
            else:
                printed = run_python(code, folder, held.setdefault("run_blocks_names", {"__name__": "page"}))
            shown = self._shown(printed)
            picture = self._picture(folder)
        except (RuntimeError, OSError) as error:
            raise ExtensionError(
                f"{self.env.docname}, line {self.lineno}: this block fails:\n{code}\n{error}"
            ) from None
        source = nodes.literal_block(code, code, language=language)
        output = nodes.literal_block(shown, shown, language="text", classes=["output"])
        return [source, *([output] if shown else []), *picture]

    def _shown(self, printed: str) -> str:
        lines = [line.rstrip() for line in printed.rstrip().splitlines()]
        begin = self.options.get("start-at")
        if begin is None:
            return "\n".join(lines)
        first = next((number for number, line in enumerate(lines) if line.startswith(begin)), None)
        if first is None:
            raise RuntimeError(f"It prints no line that begins with {begin!r}:\n{printed}")
        return "\n".join(lines[first:])

    def _picture(self, folder: Path) -> list[nodes.Node]:
        if "picture" not in self.options:
            return []
        made = folder / self.options["picture"]
        target = Path(PICTURES) / f"{self.env.docname}_{self.lineno}{made.suffix}"
        (Path(self.env.srcdir) / PICTURES).mkdir(exist_ok=True)
        shutil.copyfile(made, self.env.srcdir / target)
        return [nodes.image(uri=f"/{target}", alt=self.options["alt"])]


def setup(app: Any) -> dict[str, bool]:
    """Join the build."""
    app.add_directive("run", Run)
    return {"parallel_read_safe": False}  # blocks take all cores that there are
