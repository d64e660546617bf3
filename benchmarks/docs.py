"""``make bench-docs``: put the figures of the latest run into the documentation.

Every figure of ``docs/explanation/performance.md`` and of the README is between two marks and comes
from the JSON of a run, so that none is typed manually and none is forgotten.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import report, sizing
from benchmarks.plot import svg

REPOSITORY = Path(__file__).resolve().parents[1]
LATEST = REPOSITORY / "benchmarks" / "results" / "latest.json"
PAGE = REPOSITORY / "docs" / "explanation" / "performance.md"
README = REPOSITORY / "README.md"
PICTURE = PAGE.with_suffix(".svg")

#: Shown where the page has a part that the latest run has not measured.
NOT_MEASURED = "Not measured in the latest run."

_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def filled(page: str, document: dict[str, Any]) -> str:
    """The page with the figures of this run."""
    texts = {
        **report.sections(document),
        **sizing.sections(document),
        "headline": report.headline(document),
    }

    def figures(found: re.Match[str]) -> str:
        return f"{found[1]}{texts.get(found[2], NOT_MEASURED)}\n{found[3]}"

    return _MARKED.sub(figures, page)


def main() -> int:
    document = json.loads(LATEST.read_text())
    wanted = set(_MARKED.findall(PAGE.read_text()))
    there = {**report.sections(document), **sizing.sections(document)}
    missing = sorted({name for _, name, _ in wanted} - there.keys())
    if missing:
        print(f"{LATEST} lacks {', '.join(missing)}: run make bench without --only")
        return 1
    for page in (PAGE, README):
        page.write_text(filled(page.read_text(), document))
    PICTURE.write_text(svg(document["results"]))
    print(f"{PAGE}\n{README}\n{PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
