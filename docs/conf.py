"""Sphinx: `make docs` builds docs/_build/html, and a warning is an error."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "celery_unique"
author = "celery_unique contributors"
copyright = "celery_unique contributors"  # noqa: A001
# Read, not imported: the documentation builds without the package's dependencies.
_INIT = (ROOT / "celery_unique" / "__init__.py").read_text(encoding="utf-8")
release = version = re.findall(r'^__version__ = "(.+)"$', _INIT, re.MULTILINE)[0]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
#: Links to headings, as GitHub makes them, down to the third level.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"celery_unique {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
