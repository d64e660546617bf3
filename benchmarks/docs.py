"""``make bench-docs``: put the figures of the latest run into the documentation.

Every figure of ``docs/explanation/performance.md`` stands between two marks and comes from the
JSON of a run, so that none is typed by hand and none is forgotten.
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
PICTURE = PAGE.with_suffix(".svg")

#: Stands where the page shows a part that the latest run has not measured.
NOT_MEASURED = "Not measured in the latest run."

_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def filled(page: str, document: dict[str, Any]) -> str:
    """The page with the figures of this run."""
    texts = {**report.sections(document), **sizing.sections(document)}

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
    PAGE.write_text(filled(PAGE.read_text(), document))
    PICTURE.write_text(svg(document["results"]))
    print(f"{PAGE}\n{PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
