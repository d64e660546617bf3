"""Calls that meet a waiting task whose worker was killed with its message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from celery_unique import DuplicateTask
from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER
from celery_unique.stores.base import Held
from tests.support.app import advance, messages, take_messages

RUN_LEASE_MS = 60_000
DAY_MS = 86_400_000


def fetch_and_die(app: Celery, result: Any) -> None:
    """What a worker leaves that took the message and was killed."""
    [taken] = take_messages(app)
    assert taken.id == result.id
    store = state_of(app).store
    store.flush()
    store.renew([Held(result.unique_key, result.id, "", DAY_MS, held_ms=RUN_LEASE_MS)])
    advance(app, RUN_LEASE_MS / 1000 + 1)


def test_one_of_many_duplicates_publishes_the_message_again(app, rebuild):
    first = rebuild.delay(7)
    fetch_and_die(app, first)

    answers = [rebuild.delay(7) for _ in range(3)]

    assert {(each.id, each.outcome) for each in answers} == {(first.id, "deduplicated")}
    [copy] = messages(app)
    assert (copy.id, copy.args) == (first.id, [7])
    assert copy.headers[HEADER]["id"] == first.id
    record, _ = state_of(app).store.read(first.unique_key)
    assert record.tasks[first.id].copies
    # It waits in the broker now, for as long as that takes.
    advance(app, 3600)
    assert rebuild.delay(7).id == first.id
    assert len(messages(app)) == 1


def test_the_copy_keeps_the_eta_of_the_task_and_not_that_of_the_call(app, rebuild):
    first = rebuild.apply_async((7,), countdown=3600)
    fetch_and_die(app, first)

    assert rebuild.apply_async((7,), countdown=7200).id == first.id

    [copy] = messages(app)
    assert copy.id == first.id
    lead = datetime.fromisoformat(copy.headers["eta"]) - datetime.now(UTC)
    assert timedelta(minutes=30) < lead < timedelta(minutes=60)  # a minute has passed


def test_a_call_that_is_refused_has_the_task_run_all_the_same(app, rebuild):
    first = rebuild.delay(7)
    fetch_and_die(app, first)

    with pytest.raises(DuplicateTask):
        rebuild.apply_async((7,), unique_on_conflict="reject")

    assert [each.id for each in messages(app)] == [first.id]


def test_a_call_with_callbacks_follows_and_publishes_nothing(app, rebuild):
    """Its message is its own: under another's id its callbacks would be sent twice."""
    first = rebuild.delay(7)
    fetch_and_die(app, first)

    joined = rebuild.apply_async((7,), link=rebuild.si(8))

    assert joined.outcome == "joined"
    assert messages(app) == []
    assert rebuild.delay(7).id == first.id
    assert [each.id for each in messages(app)] == [first.id]


def test_a_copy_that_could_not_be_published_is_published_by_the_next_call(
    app, rebuild, monkeypatch
):
    first = rebuild.delay(7)
    fetch_and_die(app, first)
    with monkeypatch.context() as broken:
        broken.setattr(app.amqp, "send_task_message", _fails)
        with pytest.raises(ConnectionError):
            rebuild.delay(7)
    assert messages(app) == []
    advance(app, 0.01)

    assert rebuild.delay(7).id == first.id

    assert [each.id for each in messages(app)] == [first.id]


def _fails(*args: Any, **options: Any) -> None:
    raise ConnectionError("the broker is away")
