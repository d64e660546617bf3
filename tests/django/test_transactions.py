"""``django-db://``: a caller's open transaction neither holds nor hides a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.django.inside import inside_django
from tests.django.people import another_store

DATABASES = pytest.mark.parametrize("alias", ["default", "small"], ids=["postgresql", "sqlite"])


@contextmanager
def locks_in(alias: str) -> Iterator[None]:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS shop_order (number INTEGER)")
    with another_store(f"django-db://{alias}"):
        yield


def elsewhere(call: Callable[[], Any]) -> Any:
    """The answer of another thread, which has connections of its own."""
    answers: list[Any] = []

    def ask() -> None:
        from django.db import connections

        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


def write(alias: str, number: int) -> None:
    """From here on the transaction holds what a writer holds: on SQLite, the whole file."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO shop_order VALUES (%s)", [number])


def orders(alias: str, number: int) -> int:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM shop_order WHERE number = %s", [number])
        return int(cursor.fetchone()[0])


@DATABASES
@inside_django
def test_a_lock_taken_in_an_open_transaction_is_seen_by_others_at_once(alias):
    from django.db import transaction

    from celery_unique import lookup
    from tests.django.shop.tasks import rebuild_index

    with locks_in(alias), transaction.atomic(using=alias):
        write(alias, 100)
        first = rebuild_index.delay(100)
        again = elsewhere(lambda: rebuild_index.delay(100))
        other = elsewhere(lambda: rebuild_index.delay(101))
        seen = lookup(rebuild_index, (100,))

        assert (first.outcome, again.outcome, other.outcome) == (
            "created",
            "deduplicated",
            "created",
        )
        assert again.id == first.id
        assert seen is not None
        assert seen.task_id == first.id


@DATABASES
@inside_django
def test_a_rollback_does_not_undo_the_lock_of_what_was_published(alias):
    from django.db import transaction

    from celery_unique import lookup
    from tests.django.shop.tasks import rebuild_index

    with locks_in(alias):
        with transaction.atomic(using=alias):
            write(alias, 200)
            first = rebuild_index.delay(200)
            transaction.set_rollback(True, using=alias)

        held = lookup(rebuild_index, (200,))
        assert orders(alias, 200) == 0
        assert held is not None
        assert held.task_id == first.id


@DATABASES
@inside_django
def test_an_open_transaction_does_not_keep_a_lock_from_ending(alias):
    from django.db import transaction

    from celery_unique import lookup, release
    from tests.django.shop.tasks import rebuild_index

    with locks_in(alias), transaction.atomic(using=alias):
        write(alias, 300)
        rebuild_index.delay(300)

        assert elsewhere(lambda: release(rebuild_index, (300,))) is True
        assert lookup(rebuild_index, (300,)) is None, "seen here, whatever this transaction saw"
        assert not rebuild_index.delay(300).deduplicated


@DATABASES
@inside_django
def test_a_database_that_waits_for_this_transaction_is_not_waited_for(alias):
    """Two callers that each wait for the other's rows must both get their locks."""
    from django.db import transaction

    from tests.django.shop.tasks import rebuild_index

    def call_in_a_transaction() -> str:
        with transaction.atomic(using=alias):
            return str(rebuild_index.delay(401).outcome)

    with locks_in(alias), transaction.atomic(using=alias):
        write(alias, 400)
        assert rebuild_index.delay(400).outcome == "created"
        assert elsewhere(call_in_a_transaction) == "created"


@inside_django
def test_the_files_of_sqlite_are_apart_and_the_projects_own_is_left_as_it_is():
    from pathlib import Path

    from django.db import connections

    from tests.django.shop.tasks import rebuild_index

    with locks_in("small"):
        rebuild_index.delay(500)
    own = Path(connections["small"].settings_dict["NAME"])

    with connections["small"].cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("delete",)
    assert "celery_unique_lock" not in connections["small"].introspection.table_names()
    assert own.with_name("small.celery_unique.sqlite3").exists()
