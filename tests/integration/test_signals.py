"""Nothing happens silently: what each signal tells, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject

import celery_unique
from celery_unique import DuplicateTask
from tests.support import eventually
from tests.support.app import advance, flush, make_app, value_of, working

SIGNALS = (
    "unique_acquired",
    "unique_conflict",
    "unique_released",
    "unique_superseded",
    "unique_lost",
    "unique_store_error",
)


class Heard(list[tuple[str, dict[str, Any]]]):
    """Every signal of the library, in the order in which they came."""

    def hear(self, signal: Any, **facts: Any) -> None:
        self.append((signal.name, facts))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [facts for heard, facts in self if heard == name]

    def names(self) -> list[str]:
        return [name for name, _ in self]


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    for name in SIGNALS:
        getattr(celery_unique, name).connect(heard.hear)
    yield heard
    for name in SIGNALS:
        getattr(celery_unique, name).disconnect(heard.hear)


@pytest.fixture
def app(local_app: Celery) -> Celery:
    return local_app


def task_of(app: Celery, body: Any = None, **options: Any) -> Any:
    def rebuild(shop_id: int) -> Any:
        return body() if body is not None else shop_id

    return app.task(name="shop.rebuild", **{"unique": True, **options})(rebuild)


# -- callers ------------------------------------------------------------------------------------


def test_a_call_that_takes_its_key_says_so(app, heard):
    result = task_of(app).delay(7)

    assert heard == [
        (
            "unique_acquired",
            {
                "sender": "shop.rebuild",
                "task_id": result.id,
                "key": result.unique_key,
                "app": app,
            },
        )
    ]


@pytest.mark.parametrize("strategy", ["ignore", "reject"])
def test_a_call_that_finds_its_key_held_says_who_holds_it(app, heard, strategy):
    rebuild = task_of(app, unique_on_conflict=strategy)
    first = rebuild.delay(7)
    flush(app)

    try:
        rebuild.delay(7)
    except DuplicateTask:
        assert strategy == "reject"

    assert heard.names() == ["unique_acquired", "unique_conflict"]
    assert 0 <= heard.of("unique_conflict")[0].pop("waited_s") < 60
    assert heard.of("unique_conflict") == [
        {
            "sender": "shop.rebuild",
            "task_id": first.id,
            "state": "available",
            "key": first.unique_key,
            "on_conflict": strategy,
            "app": app,
        }
    ]


def test_a_call_that_is_not_unique_sends_nothing(app, heard):
    task_of(app, unique=False).delay(7)

    assert heard == []


def test_a_receiver_that_fails_fails_no_call(app):
    def fail(**_: Any) -> None:
        raise ZeroDivisionError

    celery_unique.unique_acquired.connect(fail)
    try:
        result = task_of(app).delay(7)
    finally:
        celery_unique.unique_acquired.disconnect(fail)

    assert result.outcome == "created"


def test_a_receiver_can_ask_for_one_task(app):
    seen: list[str] = []

    def hear(sender: str, **_: Any) -> None:
        seen.append(sender)

    celery_unique.unique_acquired.connect(hear, sender="shop.rebuild")
    try:
        task_of(app).delay(7)
        app.send_task("other", kwargs={"x": 1}, unique=True)
    finally:
        celery_unique.unique_acquired.disconnect(hear, sender="shop.rebuild")

    assert seen == ["shop.rebuild"]


def test_a_duplicate_of_a_task_that_has_waited_long_is_warned_about(app, caplog):
    """Its message may be gone with a purged queue: such a lock must not swallow calls silently."""
    rebuild = task_of(app)
    first = rebuild.delay(7)
    advance(app, 30 * 60)
    rebuild.delay(7)
    assert not caplog.records

    advance(app, 40 * 60)
    rebuild.delay(7)

    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert first.id in record.getMessage()
    assert "release" in record.getMessage()


# -- ends ---------------------------------------------------------------------------------------


def fail() -> None:
    raise ZeroDivisionError


def ignore() -> None:
    raise Ignore


def reject() -> None:
    raise Reject(requeue=False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [(lambda: 1, "completed"), (fail, "discarded"), (ignore, "cancelled"), (reject, "discarded")],
    ids=["success", "failure", "ignored", "rejected"],
)
def test_a_task_that_ends_gives_its_key_back_and_says_so(app, heard, body, reason):
    rebuild = task_of(app, body)

    result = rebuild.delay(7)  # before there is a worker, which may be done before it is told
    with working(app):
        eventually(lambda: heard.of("unique_released"))

    assert heard.names() == ["unique_acquired", "unique_released"]
    assert heard.of("unique_released") == [
        {
            "sender": "shop.rebuild",
            "task_id": result.id,
            "key": result.unique_key,
            "reason": reason,
            "app": app,
        }
    ]


def test_a_task_that_is_revoked_in_the_queue_gives_its_key_back_once_and_says_so(app, heard):
    rebuild = task_of(app)
    result = rebuild.delay(7)

    result.revoke()
    with working(app):
        marker = rebuild.delay(8)
        value_of(marker)

    released = [(facts["sender"], facts["task_id"]) for facts in heard.of("unique_released")]
    assert released == [("shop.rebuild", result.id), ("shop.rebuild", marker.id)]
    assert heard.of("unique_lost") == []


def test_a_key_that_an_operator_releases_is_reported_as_released(app, heard):
    rebuild = task_of(app)
    result = rebuild.delay(7)

    celery_unique.release(rebuild, (7,))

    [told] = heard.of("unique_released")
    assert (told["sender"], told["task_id"], told["key"]) == (
        "shop.rebuild",
        result.id,
        result.unique_key,
    )
    assert told["reason"] == "released manually"


# -- locks that lapsed --------------------------------------------------------------------------


def test_a_task_whose_lock_lapsed_in_the_queue_runs_and_says_so(heard):
    app = make_app("memory://", unique_queue_lease=2 * 3600)
    rebuild = task_of(app)
    result = rebuild.delay(7)
    flush(app)
    advance(app, 3 * 3600)

    with working(app):
        assert value_of(result) == 7

    [told] = heard.of("unique_lost")
    assert (told["sender"], told["task_id"], told["key"], told["app"]) == (
        "shop.rebuild",
        result.id,
        result.unique_key,
        app,
    )
    assert "lapsed" in told["reason"]


def test_a_task_whose_lock_lapsed_while_it_ran_does_not_free_the_next_holders(app, heard):
    results: list[Any] = []

    def body() -> None:
        if results:
            return
        advance(app, 3600)
        results.append(rebuild.apply_async((7,), countdown=3600))
        flush(app)

    rebuild = task_of(app, body)

    with working(app):
        first = rebuild.delay(7)
        value_of(first)

    assert [facts["task_id"] for facts in heard.of("unique_lost")] == [first.id]
    assert results[0].outcome == "created"
    assert celery_unique.lookup(rebuild, (7,)).task_id == results[0].id
