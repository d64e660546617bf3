"""The pages of conformance and guarantees name tests that exist, and claim nothing else."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from celery import Celery

import celery_unique
from celery_unique import lookup
from celery_unique.stores import BUILT_IN, open_store
from celery_unique.testing.store_contract import LockStoreContract
from tests.docs.pages import DOCS, ROOT, named_tests, rows_with_tests

CONFORMANCE = DOCS / "reference" / "conformance.md"
GUARANTEES = DOCS / "explanation" / "guarantees.md"
#: Runs the tests that are shipped for every store.
CONTRACT = "stores/test_contract.py"
STATUSES = ("met", "partly", "planned", "otherwise")


class Row(NamedTuple):
    document: str
    section: str
    asks_for: str
    status: str
    how: str
    shown_by: str


def rows() -> list[Row]:
    found: list[Row] = []
    document = ""
    for line in CONFORMANCE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            document = line[3:]
        elif line.startswith("| ") and not line.startswith(("| ---", "| section")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.append(Row(document, *cells))
    return found


def pages_naming_tests() -> list[tuple[str, str, str]]:
    return [
        (page.name, file, name)
        for page in (CONFORMANCE, GUARANTEES)
        for file, name in dict.fromkeys(named_tests(page.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize(("page", "file", "name"), pages_naming_tests())
def test_every_test_that_is_named_exists(page, file, name):
    path = ROOT / "tests" / file

    assert path.is_file(), f"{page}: there is no {file}"
    text = path.read_text(encoding="utf-8")
    inherited = file == CONTRACT and hasattr(LockStoreContract, name)
    assert inherited or re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE)


@pytest.mark.parametrize("row", rows_with_tests(GUARANTEES), ids=lambda row: row.name)
def test_every_guarantee_is_complete_and_names_its_tests(row):
    assert all(row.cells)
    assert named_tests(row.tests)


def test_every_row_has_a_status_and_what_it_needs():
    for row in rows():
        assert row.status in STATUSES, row
        if row.status in ("met", "partly"):
            assert named_tests(row.shown_by), f"no test shows it: {row}"
        if row.status in ("partly", "otherwise"):
            assert row.how, f"it does not say why: {row}"


#: How many requirements each section of the Open Job Spec states with MUST, SHOULD or MAY; 5.4's
#: second sentence and A.3 have two in one row, and 2.1's first row and a few others have none.
OJS_NORMATIVE_ROWS = {
    "2.1": 1, "2.2": 5, "4.2": 5, "5.1": 2, "5.2": 3, "5.4": 2, "6.2": 2, "6.4": 1, "7.2": 2,
    "8.1": 1, "8.3": 3, "8.4": 11, "9.2": 1, "12": 2, "A.1": 1, "A.3": 1,
    **{f"14.{number}": 1 for number in range(1, 12)},
}  # fmt: skip


def test_every_requirement_of_the_open_job_spec_has_its_row():
    normative = Counter(
        row.section
        for row in rows()
        if row.document.startswith("Open Job Spec")
        and re.search(r"\((MUST|MUST NOT|SHOULD|MAY)\)", row.asks_for)
    )

    assert normative == OJS_NORMATIVE_ROWS


def test_all_five_documents_are_there():
    counted = Counter(row.document.partition(":")[0] for row in rows())
    print(dict(counted), Counter(row.status for row in rows()))

    assert set(counted) == {"Open Job Spec", "Stem", "Tasker", "Flovyn", "Tasks package"}


# -- What no other test shows ----------------------------------------------------------------------


def test_the_exceptions_are_documented():
    text = GUARANTEES.read_text(encoding="utf-8")

    assert text.index("a body can run twice") < text.index("## What holds")
    assert "## Exceptions" in text
    assert "## Write bodies that can run twice" in text


# Django's are the stores of what is behind them: tests/stores/test_django_stores.py.
@pytest.mark.parametrize("scheme", [name for name in BUILT_IN if not name.startswith("django-")])
def test_every_store_names_its_guarantee_and_mechanism(scheme, tmp_path):
    url = {
        "sqlite": f"sqlite:///{tmp_path}/locks.db",
        "memory": "memory://",
        "sentinel": "sentinel://127.0.0.1:1/0?sentinel_master=locks",
    }
    store = open_store(url.get(scheme, f"{scheme}://127.0.0.1:1/x".replace("/x", "/0")))

    fails_over = scheme in ("sentinel", "redis+cluster", "rediss+cluster")
    assert store.guarantee == ("best-effort" if fails_over else "strong")
    assert store.mechanism


def make_task(**settings: Any) -> tuple[Celery, Any]:
    app = Celery("conformance", broker="memory://")
    celery_unique.install(app, **settings)

    @app.task(unique=True, name="conformance.charge")
    def charge(order_id: int) -> None: ...

    return app, charge


def test_a_waiting_key_outlives_the_visibility_timeout():
    app, charge = make_task(namespace="visible", queue_lease="PT1M")
    app.conf.broker_transport_options = {"visibility_timeout": 7200}
    charge.delay(7)

    lock = lookup(charge, (7,))

    assert lock is not None
    assert lock.expires_at - lock.created_at > timedelta(hours=2)
