"""Sphinx makes pages of the Markdown files as they are, and the reference from the docstrings: `make docs`.

The source directory is the repository's root, so that a link leads to the same file here and on a forge.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fusednorm  # noqa: E402  found by the line above, also where it is not installed

project = "fusednorm"
release = fusednorm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/RESULTS.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "out"]
html_theme = "furo"
html_title = f"fusednorm {release}"

myst_heading_anchors = 3  # a link to a heading is checked, too
highlight_language = "text"
default_role = "code"  # docstrings name code as Markdown does: `x`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
autodoc_preserve_defaults = True
