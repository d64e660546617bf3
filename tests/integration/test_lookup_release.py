"""Looking at a lock and letting go of one, by call and by key."""

from __future__ import annotations

import dataclasses
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from celery_unique import (
    ConfigurationError,
    InvalidPolicy,
    Lock,
    StoreUnavailable,
    UniqueKeyError,
    lookup,
    release,
)
from celery_unique.config.app_state import state_of
from tests.support import eventually
from tests.support.app import advance, flush, make_app, messages, plain_app, value_of, working

NAME = "shop.rebuild"
SOON = timedelta(seconds=30)


def task_of(app: Celery, **options: Any) -> Any:
    @app.task(name=NAME, **{"unique": True, **options})
    def rebuild(shop_id: int, full: bool = False) -> int:
        return shop_id

    return rebuild


def found(*args: Any, **kwargs: Any) -> Lock:
    lock = lookup(*args, **kwargs)
    assert lock is not None
    return lock


# -- what a lock tells -----------------------------------------------------------------------------


def test_the_lock_of_a_task_that_waits(app):
    rebuild = task_of(app, unique_for=600)
    result = rebuild.delay(7)
    flush(app)

    lock = found(rebuild, (7,))

    now = datetime.now(UTC)
    assert abs(lock.created_at - now) < SOON
    assert abs(lock.expires_at - (now + timedelta(hours=24))) < SOON
    assert lock == Lock(
        key=result.unique_key,
        task_name=NAME,
        task_id=result.id,
        state="available",
        created_at=lock.created_at,
        expires_at=lock.expires_at,
        window_ends_at=lock.created_at + timedelta(minutes=10),
        eta=None,
        duplicates=0,
        last_duplicate_at=None,
        worker=None,
    )


@pytest.mark.parametrize(
    ("options", "state"), [({}, "available"), ({"countdown": 3600}, "scheduled")]
)
def test_the_lock_of_a_task_that_was_published_a_moment_ago_is_not_pending(
    app, monkeypatch, options, state
):
    """The store is told one way that the message is out: it may be slow to hear it."""
    rebuild, store = task_of(app), state_of(app).store
    told, confirm, flush_store = [], store.confirm, store.flush

    def flush_slowly(*args: Any) -> None:
        for one in told:
            confirm(*one)
        flush_store(*args)

    monkeypatch.setattr(store, "confirm", lambda *one: told.append(one))
    monkeypatch.setattr(store, "flush", flush_slowly)
    result = rebuild.apply_async((7,), **options)

    lock = found(rebuild, (7,))

    assert (lock.task_id, lock.state) == (result.id, state)
    assert lock.expires_at - lock.created_at >= timedelta(hours=24)


def test_a_store_that_does_not_hear_of_the_publish_does_not_hide_the_lock(local_app, monkeypatch):
    local_app.conf.unique_store_timeout = 1.5
    rebuild, store = task_of(local_app), state_of(local_app).store
    waits = []

    def never(timeout_s: float | None = None) -> None:
        waits.append(timeout_s)
        raise StoreUnavailable("busy")

    monkeypatch.setattr(store, "confirm", lambda *_: None)
    monkeypatch.setattr(store, "flush", never)
    rebuild.delay(7)

    assert found(rebuild, (7,)).state == "pending"
    assert waits == [1.5]


def test_a_lookup_does_not_wait_for_what_is_told_of_other_locks(local_app, monkeypatch):
    rebuild, store = task_of(local_app), state_of(local_app).store
    rebuild.delay(7)
    monkeypatch.setattr(store, "confirm", lambda *_: None)
    monkeypatch.setattr(store, "flush", lambda *_: pytest.fail("it waited"))
    rebuild.delay(8)

    assert found(rebuild, (7,)).state == "available"
    assert lookup(rebuild, (9,)) is None


def test_the_lock_of_a_task_with_an_eta_and_duplicates(app):
    rebuild = task_of(app)
    rebuild.apply_async((7,), countdown=3600)
    rebuild.delay(7)
    advance(app, 60)
    rebuild.delay(7)
    flush(app)

    lock = found(rebuild, (7,))

    assert (lock.state, lock.duplicates) == ("scheduled", 2)
    assert lock.eta is not None
    assert lock.last_duplicate_at is not None
    assert abs(lock.eta - (lock.created_at + timedelta(hours=1))) < timedelta(seconds=1)
    assert timedelta(seconds=60) <= lock.last_duplicate_at - lock.created_at < SOON * 3


def test_the_lock_of_a_task_that_runs_names_its_worker(app):
    may_end = threading.Event()

    @app.task(name="slow", unique=True)
    def slow() -> None:
        may_end.wait(20)

    with working(app, hostname="w1@here"):
        result = slow.delay()
        try:
            eventually(lambda: found(slow).state == "active")
            lock = found(slow)
        finally:
            may_end.set()
        value_of(result)

    assert lock.worker == "w1@here"
    assert str(os.getpid()) not in (lock.worker or "")
    assert abs(lock.expires_at - (lock.created_at + timedelta(seconds=60))) < SOON


def test_the_lock_of_a_task_that_ended_within_its_window(app):
    rebuild = task_of(app, unique_for=600, unique_states="window")
    with working(app):
        result = rebuild.delay(7)
        value_of(result)

    lock = found(rebuild, (7,))

    assert (lock.task_id, lock.state) == (result.id, "completed")
    assert lock.expires_at == lock.window_ends_at
    advance(app, 601)
    assert lookup(rebuild, (7,)) is None


def test_a_lock_cannot_be_changed_and_does_not_show_its_key(local_app):
    """The key is derived from arguments, and a lock may be logged."""
    rebuild = task_of(local_app)
    rebuild.delay(7)

    lock = found(rebuild, (7,))

    assert lock.key.startswith("1:")
    assert lock.key not in repr(lock)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lock.state = "active"  # type: ignore[misc]


# -- how it is found -------------------------------------------------------------------------------


def test_a_lock_is_found_by_any_form_of_the_call_and_by_key(app):
    rebuild = task_of(app)
    result = rebuild.delay(7)

    locks = [
        lookup(rebuild, (7,)),
        lookup(rebuild, [7]),
        lookup(rebuild, kwargs={"shop_id": 7}),
        lookup(rebuild, (7,), {"full": False}),
        lookup(NAME, (7,), app=app),
        lookup(app.tasks[NAME], (7,)),
        lookup(key=result.unique_key, app=app),
    ]

    assert {lock.task_id if lock else None for lock in locks} == {result.id}


def test_a_free_key_has_no_lock_and_cannot_be_released(app):
    rebuild = task_of(app)
    key = rebuild.delay(7).unique_key

    assert lookup(rebuild, (8,)) is None
    assert release(rebuild, (8,)) is False
    assert release(rebuild, (7,)) is True
    assert release(rebuild, (7,)) is False
    assert lookup(rebuild, (7,)) is None
    assert lookup(key=key, app=app) is None


def test_looking_takes_and_changes_nothing(app):
    rebuild = task_of(app)
    rebuild.delay(7)
    flush(app)

    before = found(rebuild, (7,))
    lookup(rebuild, (8,))

    assert found(rebuild, (7,)) == before
    assert rebuild.delay(8).outcome == "created"


def test_a_lock_is_found_by_an_idempotency_key(app):
    rebuild = task_of(app)
    result = rebuild.apply_async((7,), idempotency_key="order-7")

    assert found(rebuild, idempotency_key="order-7").task_id == result.id
    assert found(NAME, idempotency_key="order-7", app=app).task_id == result.id
    assert lookup(rebuild, idempotency_key="order-8") is None
    assert lookup(rebuild, (7,)) is None


def test_in_the_current_app_a_key_needs_no_app(local_app):
    rebuild = task_of(local_app)
    result = rebuild.delay(7)

    local_app.set_current()
    try:
        assert found(key=result.unique_key).task_id == result.id
        assert found(NAME, (7,)).task_id == result.id
    finally:
        from celery import _state

        _state._tls.current_app = None


# -- release ---------------------------------------------------------------------------------------


def test_a_released_key_admits_the_next_call_and_the_holder_still_runs(app):
    ran: list[int] = []

    @app.task(name="count", unique=True)
    def count(shop_id: int) -> int:
        ran.append(shop_id)
        return len(ran)

    first = count.delay(7)

    assert release(count, (7,)) is True
    second = count.delay(7)

    assert second.outcome == "created"
    assert [sent.id for sent in messages(app)] == [first.id, second.id]
    with working(app):
        assert [value_of(first), value_of(second)] == [1, 2]
        assert count.delay(7).outcome == "created"


def test_a_holder_that_was_released_does_not_free_the_next_ones_key(app):
    rebuild = task_of(app)
    first = rebuild.delay(7)
    release(rebuild, (7,))
    second = rebuild.apply_async((7,), countdown=3600)
    flush(app)

    with working(app):
        value_of(first)

        assert found(rebuild, (7,)).task_id == second.id
        assert rebuild.delay(7).id == second.id


def test_a_key_is_released_by_key_and_by_name(app):
    rebuild = task_of(app)
    first, second = rebuild.delay(7), rebuild.delay(8)

    assert release(key=first.unique_key, app=app) is True
    assert release(NAME, (8,), app=app) is True

    assert rebuild.delay(7).id != first.id
    assert rebuild.delay(8).id != second.id


# -- wrong use -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, InvalidPolicy, "none was given"),
    "task and key": ({"task": NAME, "key": "1:" + "0" * 64}, InvalidPolicy, "more than one"),
    "no task": ({"task": 7}, InvalidPolicy, "task"),
    "unknown task": ({"task": "shop.rebiuld"}, InvalidPolicy, r"shop\.rebiuld.*shop\.rebuild"),
    "a task that is not unique": ({"task": "plain"}, InvalidPolicy, "not unique"),
    "arguments that do not fit": ({"task": NAME, "args": (1, 2, 3)}, UniqueKeyError, "positional"),
    "a missing argument": ({"task": NAME}, UniqueKeyError, "shop_id"),
    "an argument without a key": ({"task": NAME, "args": (object(),)}, UniqueKeyError, "shop_id"),
    "arguments that are none": ({"task": NAME, "args": 7}, InvalidPolicy, "args"),
    "a string as arguments": ({"task": NAME, "args": "7"}, InvalidPolicy, "args"),
    "keywords that are none": ({"task": NAME, "kwargs": [7]}, InvalidPolicy, "kwargs"),
    "a key that is no string": ({"key": 7}, InvalidPolicy, "key"),
    "a key of another make": ({"key": "lock:shop:7"}, InvalidPolicy, "unique_key"),
    "a shortened key": ({"key": "1:abcdef"}, InvalidPolicy, "unique_key"),
    "an idempotency key without its task": (
        {"idempotency_key": "order-7"},
        InvalidPolicy,
        "task",
    ),
    "an empty idempotency key": (
        {"task": NAME, "idempotency_key": ""},
        UniqueKeyError,
        "idempotency_key",
    ),
}


@pytest.mark.parametrize("act", [lookup, release])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_a_clear_error(local_app, act, wrong):
    arguments, error, says = WRONG[wrong]
    task_of(local_app)

    @local_app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(error, match=f"(?s){says}"):
        act(**arguments, app=local_app)


def test_headers_in_the_key_are_looked_up_by_key_alone(local_app):
    rebuild = task_of(local_app, unique_meta="tenant")
    result = rebuild.apply_async((7,), headers={"tenant": "a"})

    with pytest.raises(UniqueKeyError, match="key="):
        lookup(rebuild, (7,))

    assert found(key=result.unique_key, app=local_app).task_id == result.id


def test_an_app_that_is_not_installed_is_told_what_to_do():
    app = plain_app()

    @app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(ConfigurationError, match=r"celery_unique\.install"):
        lookup(plain)
    with pytest.raises(ConfigurationError, match=r"celery_unique\.install"):
        lookup(key="1:" + "0" * 64, app=app)


def test_an_app_without_a_store_is_told_what_to_set():
    app = make_app(broker_url="amqp://localhost")

    with pytest.raises(ConfigurationError, match="unique_store_url"):
        lookup(task_of(app), (7,))
