"""What the pages say of keys that callers bring, with a worker in a thread of the test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique import (
    DuplicateTask,
    IdempotencyKeyConflict,
    IdempotencyKeyRequired,
    lookup,
    release,
)
from celery_unique.config.app_state import state_of
from tests.support import app as apps


@pytest.fixture
def app() -> Iterator[Celery]:
    app = apps.make_app("memory://")
    yield app
    state_of(app).store.clock_offset_ms = 0


@pytest.fixture
def pay(app: Celery) -> Any:
    @app.task(name=f"{app.main}.pay")
    def pay(account: str, amount: int) -> int:
        if amount < 0:
            raise ValueError(amount)
        return amount

    return pay


@contextmanager
def working(app: Celery) -> Iterator[None]:
    """A worker in a thread; what it does to the process's logging is undone."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with apps.working(app):
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def advance(app: Celery, duration: timedelta) -> None:
    state_of(app).store.clock_offset_ms += int(duration.total_seconds() * 1000)


def test_a_key_that_is_known_answers_with_its_task(pay):
    first = pay.apply_async(("a", 1), idempotency_key="k")
    again = pay.apply_async(("a", 1), idempotency_key="k")
    other = pay.apply_async(("a", 1), idempotency_key="l")

    assert (first.outcome, again.outcome, other.outcome) == ("created", "deduplicated", "created")
    assert again.id == first.id


def test_a_finished_task_answers_with_its_result_until_its_time_is_over(app, pay):
    with working(app):
        first = pay.apply_async(("a", 1), idempotency_key="k")
        first.get(timeout=10)
        again = pay.apply_async(("a", 1), idempotency_key="k")

        assert (again.id, again.holder_state, again.get(timeout=10)) == (first.id, "completed", 1)

    advance(app, timedelta(hours=23, minutes=59))
    assert pay.apply_async(("a", 1), idempotency_key="k").id == first.id
    advance(app, timedelta(minutes=2))
    assert pay.apply_async(("a", 1), idempotency_key="k").outcome == "created"


def test_the_time_can_be_given(app, pay):
    with working(app):
        pay.apply_async(("a", 1), idempotency_key="k", idempotency_ttl="PT1H").get(timeout=10)

    advance(app, timedelta(minutes=61))
    assert pay.apply_async(("a", 1), idempotency_key="k").outcome == "created"


def test_a_task_that_still_waits_keeps_its_key_beyond_its_time(app, pay):
    first = pay.apply_async(("a", 1), idempotency_key="k", idempotency_ttl=60)

    advance(app, timedelta(minutes=2))

    assert pay.apply_async(("a", 1), idempotency_key="k").id == first.id


def test_a_failed_task_frees_its_key(app, pay):
    with working(app):
        pay.apply_async(("a", -1), idempotency_key="k").get(timeout=10, propagate=False)

        assert pay.apply_async(("a", -1), idempotency_key="k").outcome == "created"


def test_a_revoked_task_frees_its_key(pay):
    pay.apply_async(("a", 1), idempotency_key="k").revoke()

    assert pay.apply_async(("a", 1), idempotency_key="k").outcome == "created"


def test_the_same_key_with_other_arguments_is_a_conflict(pay):
    first = pay.apply_async(("a", 1), idempotency_key="k")

    with pytest.raises(IdempotencyKeyConflict):
        pay.apply_async(("a", 2), idempotency_key="k")

    by_name = pay.apply_async(kwargs={"amount": 1, "account": "a"}, idempotency_key="k")
    assert by_name.id == first.id


def test_a_key_belongs_to_its_task_or_by_setting_to_the_app(app, pay):
    @app.task(name=f"{app.main}.refund")
    def refund(account: str, amount: int) -> None: ...

    pay.apply_async(("a", 1), idempotency_key="k")
    assert refund.apply_async(("a", 1), idempotency_key="k").outcome == "created"

    app.conf.unique_idempotency_scope = "app"
    pay.apply_async(("a", 1), idempotency_key="m")
    with pytest.raises(IdempotencyKeyConflict):
        refund.apply_async(("a", 1), idempotency_key="m")


def test_the_tasks_strategy_on_conflict_counts(pay):
    pay.apply_async(("a", 1), idempotency_key="k")

    with pytest.raises(DuplicateTask):
        pay.apply_async(("a", 1), idempotency_key="k", unique=True, unique_on_conflict="reject")


def test_the_strategy_of_a_task_decides_what_a_call_without_a_key_is(app):
    @app.task(unique=True, identity_strategy="caller_provided", name=f"{app.main}.strictest")
    def strictest(order: int) -> None: ...

    @app.task(unique=True, identity_strategy="always_unique", name=f"{app.main}.free")
    def free(order: int) -> None: ...

    with pytest.raises(IdempotencyKeyRequired):
        strictest.delay(1)
    assert free.delay(1).id != free.delay(1).id


@pytest.mark.parametrize("strategy", ["strict", "caller_provided", "always_unique"])
def test_a_key_wins_over_every_strategy(app, strategy):
    @app.task(unique=True, identity_strategy=strategy, name=f"{app.main}.charge")
    def charge(order: int) -> None: ...

    first = charge.apply_async((1,), idempotency_key="k")

    assert charge.apply_async((1,), idempotency_key="k").id == first.id


def test_a_task_is_found_and_let_go_of_by_its_key(pay):
    result = pay.apply_async(("a", 1), idempotency_key="k")

    lock = lookup(pay, idempotency_key="k")

    assert lock is not None
    assert (lock.task_id, lock.key) == (result.id, result.unique_key)
    assert release(pay, idempotency_key="k") is True
    assert lookup(pay, idempotency_key="k") is None


def test_a_key_is_taken_by_a_sender_without_the_tasks_code(app, pay, sqlite_url):
    app.conf.unique_store_url = sqlite_url
    sender = Celery("sender", broker="memory://", set_as_current=False)
    celery_unique.install(sender, store_url=sqlite_url)

    first = sender.send_task(
        pay.name, kwargs={"account": "a", "amount": 1}, queue=app.main, idempotency_key="k"
    )

    assert pay.apply_async(("a", 1), idempotency_key="k").id == first.id
