"""The page on failures: every row names the tests that show it, and they exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT, named_tests, rows_with_tests

PAGE = DOCS / "explanation" / "failure-modes.md"
#: The tests of faults that show no row of their own.
UNNAMED = {
    "test_caller_that_asks_all_the_time_is_admitted_at_most_once_in_a_grace",
    "test_end_of_a_body_is_not_taken_for_a_loss_while_celery_still_has_the_request",
    "test_renewal_of_another_delivery_changes_nothing",
    "test_revoke_of_a_duplicate_revokes_the_shared_holder_and_says_so",
    "test_revoke_of_a_running_task_leaves_its_lock_alone",
    "test_revoke_of_a_task_that_waits_for_its_retry_frees_the_key",
    "test_tasks_that_others_have_published_are_found_one_after_another",
}


@pytest.mark.parametrize("row", rows_with_tests(PAGE), ids=lambda row: row.name)
def test_row_is_complete_and_names_tests_that_exist(row):
    assert len(row.cells) == 5
    assert all(row.cells)
    assert named_tests(row.tests)
    for file, name in named_tests(row.tests):
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file} has no {name}"


def test_every_row_of_a_table_has_a_name():
    claims, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Tests\n")
    rows = [line for line in claims.splitlines() if re.match(r"\| (?!---|row )", line)]

    assert len(rows) == len(rows_with_tests(PAGE))


def test_every_test_of_faults_is_on_the_page():
    on_page = {name for _, name in named_tests(PAGE.read_text(encoding="utf-8"))}
    files = (
        "busy_shutdown",
        "crashes",
        "end_order",
        "guard",
        "redelivery",
        "renewal",
        "store_outage",
        "publish_grace",
        "revoke",
        "continuations",
        "taken_over",
    )
    there = {
        name
        for file in files
        for name in re.findall(
            r"^def (test_\w+)\(",
            (ROOT / "tests/workers/faults" / f"test_{file}.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    }
    assert there - on_page == UNNAMED
