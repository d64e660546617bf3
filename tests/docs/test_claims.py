"""What the pages say of logs, secrets and silent stores, through the public API."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from celery import Celery

from celery_unique import (
    DuplicateTask,
    StoreUnavailable,
    lookup,
    release,
    unique_acquired,
    unique_store_error,
)
from celery_unique.config.app_state import state_of
from tests.support.app import make_app

#: Nothing listens there.
NOWHERE = "redis://127.0.0.1:1/0"


def make_task(**settings: Any) -> tuple[Celery, Any]:
    app = make_app(**{f"unique_{name}": value for name, value in settings.items()})

    @app.task(unique=True, name=f"{app.main}.rebuild_index")
    def rebuild_index(shop_id: int) -> None: ...

    return app, rebuild_index


def test_a_key_is_logged_at_debug_and_nowhere_above(caplog):
    _, task = make_task()
    with caplog.at_level(logging.DEBUG):
        key = task.delay(7).unique_key
        task.delay(7)
        with pytest.raises(DuplicateTask):
            task.apply_async((7,), unique_on_conflict="reject")
        task.apply_async((7,), link=task.si(8))
        task.delay(7).revoke()
        release(task, (7,))

    digest = key.partition(":")[2]
    showing = [record for record in caplog.records if digest[:16] in record.getMessage()]
    assert showing, "the test sees no line with the key at all"
    assert {record.levelno for record in showing} == {logging.DEBUG}
    assert any(record.levelno > logging.DEBUG for record in caplog.records)


def test_a_key_is_not_logged_when_the_store_does_not_answer(caplog):
    _, task = make_task(store_url=NOWHERE, on_store_error="publish")

    with caplog.at_level(logging.INFO):
        key = task.delay(7).unique_key

    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert errors
    assert [record for record in errors if key in record.getMessage()] == []


def test_a_concealed_holder_is_told_to_nobody():
    _, task = make_task(conceal_holder=True)
    first = task.delay(7)

    for on_conflict in ("ignore", "reject"):
        with pytest.raises(DuplicateTask) as caught:
            task.apply_async((7,), unique_on_conflict=on_conflict)

        assert (caught.value.task_id, caught.value.state) == (None, None)
        assert first.id not in str(caught.value)
        assert "existing_job_id" not in caught.value.to_ojs()["error"]["details"]


def test_a_store_that_does_not_answer_is_an_error_in_bounded_time_and_a_signal():
    _, task = make_task(store_url=NOWHERE, store_timeout=2)
    told = []

    def on_error(sender: str, act: str, exception: Exception, **extra: Any) -> None:
        told.append((sender, act, type(exception)))

    unique_store_error.connect(on_error)
    began = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            task.delay(7)
    finally:
        unique_store_error.disconnect(on_error)

    assert time.monotonic() - began < 10  # refused at once; the rest is for a busy machine
    assert told == [(task.name, "acquire", StoreUnavailable)]


def test_by_setting_a_call_is_published_without_a_lock():
    app, task = make_task(store_url=NOWHERE, on_store_error="publish")

    results = [task.delay(7), task.delay(7)]

    assert [result.outcome for result in results] == ["bypassed", "bypassed"]
    assert results[0].id != results[1].id
    with app.connection_for_read() as connection:
        assert connection.SimpleQueue(app.main).qsize() == 2


def test_after_two_failures_the_store_is_left_alone():
    _, task = make_task(store_url=NOWHERE)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            task.delay(7)

    with pytest.raises(StoreUnavailable, match="circuit is open for 5 seconds"):
        task.delay(7)


def test_a_lock_that_has_waited_for_an_hour_is_told_with_the_cure(caplog):
    app, task = make_task()
    task.delay(7)
    state_of(app).store.clock_offset_ms += 61 * 60 * 1000

    with caplog.at_level(logging.WARNING):
        task.delay(7)

    ours = [r for r in caplog.records if r.name == "celery_unique"]
    warnings = [r.getMessage() for r in ours if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "has waited for 61 minutes" in warnings[0]
    assert "unique release --task-id" in warnings[0]


def test_two_apps_of_one_process_have_each_their_own_locks():
    (one, task_of_one), (other, task_of_other) = make_task(), make_task()
    task_of_one.delay(7)

    assert lookup(task_of_one, (7,)) is not None
    assert lookup(task_of_other, (7,)) is None
    assert state_of(one).store is not state_of(other).store


def test_an_error_in_a_receiver_stops_nothing():
    _, task = make_task()

    def fail(**facts: Any) -> None:
        raise RuntimeError("a receiver of the user")

    unique_acquired.connect(fail)
    try:
        result = task.delay(7)
    finally:
        unique_acquired.disconnect(fail)

    assert result.outcome == "created"
    assert task.delay(7).id == result.id
