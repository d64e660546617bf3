"""The matrix is what the runs have shown: the page is made from their file, and all is green."""

from __future__ import annotations

import json

import pytest

from tests.compatibility.page import COLUMNS, NOT_RUN, PAGE, RESULTS_FILE, SHOWN, page
from tests.docs.pages import ROOT
from tests.workers.matrix import CELLS
from tests.workers.matrix import Cell as MatrixCell


@pytest.fixture(scope="module")
def document():
    return json.loads(RESULTS_FILE.read_text(encoding="utf-8"))


def test_the_page_is_what_the_file_of_the_runs_says(document):
    assert PAGE.read_text(encoding="utf-8") == page(document)


def test_every_contract_version_and_django_of_the_page_has_run(document):
    assert f" {NOT_RUN} " not in page(document)
    assert f" {NOT_RUN} " in page({"runs": [run | {"files": {}} for run in document["runs"]]})


def test_every_column_has_its_tests():
    source = (ROOT / "tests/workers/test_matrix.py").read_text(encoding="utf-8")
    there = {
        line[9:].partition("(")[0] for line in source.splitlines() if line.startswith("def test_")
    }

    assert there == {test for tests in COLUMNS.values() for test in tests} == SHOWN.keys()
    for cell in CELLS:
        assert cell.without.keys() <= there


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_cell_has_run_and_nothing_of_it_has_failed(document, cell: MatrixCell):
    shown = [run["cells"][cell.id] for run in document["runs"] if cell.id in run["cells"]]

    assert shown
    for outcomes in shown:
        assert set(outcomes.values()) == {"passed"}
        assert outcomes.keys() <= SHOWN.keys() - cell.without.keys()


def test_nothing_else_has_failed(document):
    for run in document["runs"]:
        for counts in run["files"].values():
            assert counts.keys() <= {"passed", "skipped"}
