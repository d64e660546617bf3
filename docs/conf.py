"""Sphinx: `make docs` builds docs/_build/html, and a warning is an error."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "celery_unique"
author = "celery_unique contributors"
copyright = "celery_unique contributors"  # noqa: A001
# Read, not imported: the checkout's, whatever is installed.
_INIT = (ROOT / "celery_unique" / "__init__.py").read_text(encoding="utf-8")
release = version = re.findall(r'^__version__ = "(.+)"$', _INIT, re.MULTILINE)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True
# Annotations name types of Celery and of modules that are not documented.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_member_order = "bysource"
autodoc_typehints = "none"

#: A copied command does not begin with its prompt.
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence"]
#: Links to headings, as GitHub makes them, down to the third level.
myst_heading_anchors = 3

# The search finds names; these pages would repeat them.
html_use_index = False
html_domain_indices = False
html_theme = "furo"
html_title = f"celery_unique {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
