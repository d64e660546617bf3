"""The matrix is what the runs have shown: the page is made from their file, and all is green."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility import page as compatibility
from tests.compatibility import recorder
from tests.compatibility.page import (
    COLUMNS,
    NOT_RUN,
    PAGE,
    RESULTS_FILE,
    SHOWN,
    MixedCommits,
    collect,
    main,
    page,
)
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


# -- runs of several commits ------------------------------------------------------------------


def write_run(directory: Path, name: str, **facts: Any) -> None:
    run = json.loads(RESULTS_FILE.read_text(encoding="utf-8"))["runs"][0]
    (directory / name).write_text(json.dumps(run | facts), encoding="utf-8")


def test_runs_of_one_commit_are_parts_of_one(tmp_path):
    write_run(tmp_path, "all.json", commit="0a1b2c3d")
    write_run(tmp_path, "django-5.2.json", commit="0a1b2c3d", cells={})

    document = collect(tmp_path)

    assert len(document["runs"]) == 1
    assert "Commit of all runs: `0a1b2c3d`." in page(document)


@pytest.mark.parametrize("other", ["99999999", "0a1b2c3d+", None])
def test_runs_of_other_commits_are_refused_unless_they_are_wanted(tmp_path, other):
    write_run(tmp_path, "all.json", commit="0a1b2c3d")
    write_run(tmp_path, "django-6.0.json", commit=other, cells={})

    with pytest.raises(MixedCommits, match=r"all.json of 0a1b2c3d, django-6.0.json of .*--mixed"):
        collect(tmp_path)

    document = collect(tmp_path, mixed=True)
    told = page(document)
    assert [run["commit"] for run in document["runs"]] == ["0a1b2c3d", other]
    assert "The runs are of 2 commits" in told
    assert f"| {other or 'unknown'} |" in told


def test_the_command_that_refuses_writes_nothing_and_says_why(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, "all.json", commit="0a1b2c3d")
    write_run(tmp_path, "3.12.json", commit="99999999")
    monkeypatch.setattr(collect, "__defaults__", (tmp_path,))
    written = tmp_path / "page.md"
    monkeypatch.setattr(compatibility, "PAGE", written)
    monkeypatch.setattr(compatibility, "RESULTS_FILE", tmp_path / "page.txt")

    assert main([]) == 1
    assert "the runs are not of one commit" in capsys.readouterr().err
    assert not written.exists()
    assert main(["--mixed"]) == 0
    assert "The runs are of 2 commits" in written.read_text(encoding="utf-8")


def test_a_run_records_its_commit(tmp_path):
    path = tmp_path / "all.json"
    run = recorder.Recorder(path)
    run.pytest_runtest_logreport(
        pytest.TestReport(
            f"{recorder.MATRIX}::test_eta[redis]", ("", 0, ""), {}, "passed", None, "call"
        )
    )
    run.pytest_sessionfinish()

    assert json.loads(path.read_text(encoding="utf-8"))["commit"] == recorder.commit()
