"""``unique_label``, ``live_locks``, and locks by headers and by id: on every store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_unique import (
    InvalidPolicy,
    UniqueKeyError,
    UniquePolicy,
    live_locks,
    lookup,
    release,
)
from celery_unique.cli import main
from celery_unique.config.app_state import state_of
from tests.support.app import define, flush, make_app, messages, value_of, working


def feed(feed_id: Any, full: bool = False) -> Any:
    return feed_id


# -- labels -----------------------------------------------------------------------------------


def test_a_label_is_stored_with_the_lock_and_is_no_part_of_the_key(
    app: Celery, capsys: Any
) -> None:
    task = define(app, unique=True, unique_label="feed {feed_id}", function=feed)
    other = task.apply_async((7,), unique_label="another", unique=True)
    flush(app)

    again = task.delay(7)

    assert (again.id, again.unique_key) == (other.id, other.unique_key)
    held = lookup(task, (7,))
    assert held is not None
    assert held.label == "another"
    task.delay(8)
    flush(app)
    assert {lock.label for lock in live_locks(app)} == {"another", "feed 8"}
    assert main(app, ("list", "--json", "--task-id", other.id), "celery unique") == 0
    assert json.loads(capsys.readouterr().out)["label"] == "another"
    for command in (("list",), ("show", other.id)):
        assert main(app, command, "celery unique") == 0
        assert "another" in capsys.readouterr().out


def test_a_label_stays_while_the_task_waits_runs_and_is_kept(app: Celery) -> None:
    seen: list[Any] = []

    @app.task(
        name="shop.feed",
        bind=True,
        unique=True,
        unique_states="window",
        unique_for=600,
        unique_label="{feed_id!r}: full={full}",
    )
    def task(self: Any, feed_id: str, full: bool = False) -> None:
        seen.append(lookup(task, (feed_id,)).label)

    task.apply_async(("xcd|",), queue=app.conf.task_default_queue)
    with working(app):
        value_of(task.delay("xcd|"))

    held = lookup(task, ("xcd|",))
    assert held is not None
    assert (held.state, held.label) == ("completed", "'xcd|': full=False")
    assert seen == ["'xcd|': full=False"]


def test_a_label_is_one_short_line(local_app: Celery) -> None:
    task = define(local_app, unique=True, unique_label="{feed_id}", function=feed)

    task.delay("a\nb" + "ö" * 200)

    [lock] = live_locks(local_app)
    assert lock.label == "a b" + "ö" * 77


def test_no_call_fails_for_its_label(local_app: Celery) -> None:
    task = define(local_app, unique=True, unique_label="n {feed_id:d}", function=feed)

    assert task.delay("no number").outcome == "created"
    by_name = local_app.send_task(
        "shop.elsewhere", kwargs={"a": 1}, unique=True, unique_label="{missing} {a}"
    )

    assert by_name.outcome == "created"
    assert {lock.label for lock in live_locks(local_app)} == {"n ", " 1"}


@pytest.mark.parametrize("label", [7, "", "{feed_id", "{feed.id}", "{wrong_name}"])
def test_a_wrong_label_is_an_error_where_the_task_is_defined(local_app: Celery, label: Any) -> None:
    with pytest.raises(InvalidPolicy, match=r"unique_label|wrong_name"):
        define(local_app, unique=True, unique_label=label, function=feed)


def test_records_of_calls_without_a_label_have_none(local_app: Celery) -> None:
    task = define(local_app, unique=True, function=feed)
    task.apply_async((7,), task_id="an-id", queue=local_app.conf.task_default_queue)

    [lock] = live_locks(local_app)
    assert lock.label == ""
    assert UniquePolicy(label="{feed_id}").to_ojs() == UniquePolicy().to_ojs()


# -- headers and ids --------------------------------------------------------------------------


def test_locks_of_tasks_with_unique_meta_are_found_by_headers(app: Celery) -> None:
    task = define(app, unique=True, unique_meta="tenant", function=feed)
    first = task.apply_async((7,), headers={"tenant": "a"})
    keyed = task.apply_async((7,), headers={"tenant": "a"}, idempotency_key="order-7")
    flush(app)

    found = lookup(task, (7,), headers={"tenant": "a", "other": 1})
    assert found is not None
    assert found.task_id == first.id
    assert lookup(task, (7,), headers={"tenant": "b"}) is None
    by_key = lookup(task, idempotency_key="order-7", headers={"tenant": "a"})
    assert by_key is not None
    assert by_key.task_id == keyed.id
    assert release(task, (7,), headers={"tenant": "a"})
    assert not release(task, (7,), headers={"tenant": "a"})
    for headers in (None, {}):
        with pytest.raises(UniqueKeyError):
            lookup(task, (7,), headers=headers)


def test_locks_are_found_and_released_by_the_id_of_their_task(
    app_with: Callable[..., Celery],
) -> None:
    app, elsewhere = app_with(), app_with()
    task = define(app, unique=True, function=feed)
    one, other = task.delay(7), task.delay(8)
    flush(app)

    for each in (app, elsewhere):  # which has not published it
        found = lookup(task_id=one.id, app=each)
        if each is elsewhere and state_of(app).settings.store_url == "memory://":
            assert found is None  # a store of its own
            continue
        assert found is not None
        assert (found.task_id, found.key) == (one.id, one.unique_key)
    assert lookup(task_id="unknown", app=app) is None
    assert not release(task_id="unknown", app=app)
    assert release(task_id=one.id, app=app)

    assert lookup(task_id=one.id, app=app) is None
    assert lookup(task_id=other.id, app=app) is not None
    assert task.delay(7).outcome == "created"
    with pytest.raises(InvalidPolicy, match="more than one was"):
        lookup(task, (7,), task_id=one.id)


def test_live_locks_are_those_of_tasks_that_have_not_ended(app: Celery) -> None:
    task = define(
        app, unique=True, unique_states="window", unique_for=600, name="shop.kept", function=feed
    )
    with working(app):
        value_of(task.delay(7))
    waits = task.apply_async((8,), countdown=3600)
    freed = task.apply_async((9,), countdown=3600)
    flush(app)
    release(task_id=freed.id, app=app)

    assert [(lock.task_id, lock.state) for lock in live_locks(app)] == [(waits.id, "scheduled")]
    assert len(messages(app)) == 2
    assert list(live_locks(make_app("memory://"))) == []
