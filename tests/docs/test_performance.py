"""No figure of the page on costs is typed manually."""

from __future__ import annotations

import json
import re

from benchmarks import docs, growth, growth_sql, report, sizing
from benchmarks.__main__ import PARTS
from benchmarks.databases import DATABASES
from benchmarks.plot import svg


def document() -> dict:
    return json.loads(docs.LATEST.read_text())


def test_the_page_shows_the_figures_of_the_latest_run():
    page = docs.PAGE.read_text()

    assert docs.filled(page, document()) == page, "run make bench-docs"
    readme = docs.README.read_text()
    assert docs.filled(readme, document()) == readme, "run make bench-docs"
    assert docs.PICTURE.read_text() == svg(document()["results"]), "run make bench-docs"


def test_the_page_shows_every_part_of_the_run():
    shown = set(re.findall(r"<!-- bench:(\w+) -->", docs.PAGE.read_text()))

    assert shown == report.NAMES | sizing.sections(document()).keys()


def test_a_part_that_was_not_measured_is_said_to_be_missing():
    without, page = document(), docs.PAGE.read_text()
    without["results"].pop("growth_sql", None)

    filled = docs.filled(page, without)

    assert f"<!-- bench:growth_sql -->\n{docs.NOT_MEASURED}\n<!-- /bench -->" in filled


def test_the_run_was_a_full_one_with_everything_and_everybody_in_it():
    assert document()["sizes_name"] == "full"
    assert document()["missing"] == []
    assert document()["failed"] == []

    results = document()["results"]
    assert results.keys() == PARTS.keys()
    assert results["growth"]["figures"].keys() == growth.KINDS.keys()
    assert results["growth_sql"]["stores"].keys() == DATABASES.keys()
    for store in results["growth_sql"]["stores"].values():
        assert store["figures"].keys() == growth_sql.SQL_KINDS.keys()
