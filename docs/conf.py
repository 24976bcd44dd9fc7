"""The documentation: ``sphinx-build -W docs docs/_build``."""

import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "lit-pfl"
author = "The lit-pfl developers"
release = version = installed("lit-pfl")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "sphinxcontrib.bibtex",
    "mathml",
    "method_pages",
    "run_blocks",
]
exclude_patterns = ["_build", "extensions"]
bibtex_bibfiles = ["references.bib"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"show-inheritance": True}
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, such as configurations

html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["formulas.css"]
html_theme = "furo"
html_title = "lit-pfl"
html_copy_source = False
