"""Formulas as MathML, which browsers draw themselves, without a script, a font or the network; docutils makes it.

An index after an accent needs an empty base, ``\\bar{z}{}_i``; docutils would put it below the letter otherwise.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError


def made(node: nodes.Element, as_block: bool) -> str:
    """Return a formula's MathML.

    Raises:
        ExtensionError: when docutils cannot read the LaTeX; it names the formula.
    """
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        raise ExtensionError(f"the formula {node.astext()!r}: {error}") from None


def visit_inline(translator: Any, node: nodes.Element) -> None:
    """Write a formula in a line."""
    translator.body.append(made(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    """Write a formula of its own, which scrolls where the page is narrower."""
    translator.body.append(f'<div class="math" style="overflow-x: auto">{made(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Join the build."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
