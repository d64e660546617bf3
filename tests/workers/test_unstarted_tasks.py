"""Tasks that end before any pool gets them: revoked, expired, unknown, invalid."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import celery
import pytest
from celery import Celery
from celery.app.control import Control

from tests.support import eventually
from tests.support.stage import Stage

pytestmark = pytest.mark.versions

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


@pytest.fixture
def stranger(stage: Stage) -> Celery:
    """An app at the same broker that does not know this library."""
    return Celery("stranger", broker=stage.settings["broker"], set_as_current=False)


def test_a_task_that_was_revoked_in_the_queue_frees_its_key_when_it_is_reached(
    stage, stranger, tag
):
    """By a revoke that only the worker hears of: its message waits in a queue meanwhile."""
    first = stage.call("succeed", tag, queue="later")
    Control(stranger).revoke(first.id)
    stage.worker.wait_for_log(f"Tasks flagged as revoked: {first.id}")
    assert stage.duplicate("succeed", tag).id == first.id

    stage.app.control.add_consumer("later", reply=True)

    stage.end_of(first, "REVOKED")
    stage.wait_until_free("succeed", tag)
    assert stage.props.runs(tag) == 0
    stage.assert_released(first, "cancelled")
    stage.end_of(stage.call("succeed", tag), "SUCCESS")
    stage.assert_nothing_left(first)


def test_tasks_that_are_revoked_while_a_worker_is_up_leave_no_mark_once_they_are_reached(
    stage, tag
):
    queue = f"revoked {tag}"
    results = [stage.call("succeed", f"{tag} {number}", queue=queue) for number in range(20)]
    for result in results:
        result.revoke()
    stage.worker.wait_for_log(f"Tasks flagged as revoked: {results[-1].id}")

    stage.app.control.add_consumer(queue, reply=True)

    for result in results:
        stage.end_of(result, "REVOKED")
        stage.assert_nothing_left(result)
    assert not any(stage.props.runs(f"{tag} {number}") for number in range(20))


def test_an_expired_task_frees_its_key(stage, tag):
    expired = datetime.now(UTC) - timedelta(seconds=1)
    first = stage.call("succeed", tag, expires=expired)

    stage.end_of(first, "REVOKED")

    assert stage.lock("succeed", tag) is None
    assert stage.props.runs(tag) == 0
    stage.end_of(stage.call("succeed", tag), "SUCCESS")
    stage.assert_nothing_left(first)


def test_a_task_that_expires_while_it_waits_for_its_eta_frees_its_key(stage, tag):
    first = stage.call("succeed", tag, countdown=1, expires=0.5)

    stage.end_of(first, "REVOKED")

    assert stage.lock("succeed", tag) is None
    assert stage.props.runs(tag) == 0
    stage.assert_nothing_left(first)


def test_a_task_that_the_worker_does_not_know_frees_its_key(stage, tag):
    first = _send_by_name(stage, "nobody.knows.it", kwargs={"tag": tag})

    stage.end_of(first, "FAILURE")

    eventually(lambda: not stage.left(first.unique_key))
    stage.assert_released(first, "discarded")
    assert _send_by_name(stage, "nobody.knows.it", kwargs={"tag": tag}).outcome == "created"


def test_a_message_that_is_no_task_frees_its_key(stage, tag):
    """A header that Celery cannot read, put there by a proxy or a broken client."""
    first = _send_by_name(
        stage, "succeed", args=(tag,), headers={"expires": "the day after tomorrow"}
    )
    stage.worker.wait_for_log("invalid expires value 'the day after tomorrow'")

    eventually(lambda: not stage.left(first.unique_key))

    stage.assert_released(first, "discarded")
    stage.end_of(stage.call("succeed", tag), "SUCCESS")


def test_a_message_whose_body_cannot_be_read_frees_its_key(stage, tag):
    first = stage.call("succeed", tag, queue="damaged")
    _deliver_changed(stage, "damaged", body=base64.b64encode(b"{not json").decode())

    stage.wait_until_free("succeed", tag)

    stage.worker.wait_for_log("Can't decode message body")
    stage.assert_released(first, "discarded")
    stage.assert_nothing_left(first)


def test_a_task_whose_eta_no_clock_can_show_frees_its_key(stage, tag):
    first = stage.call("succeed", tag, queue="timeless")
    _deliver_changed(stage, "timeless", headers={"eta": "0001-01-01T00:00:00+14:00"})

    # Up to 5.6 Celery runs such a task at once, although it has rejected its message.
    state, reason = ("FAILURE", "discarded") if CELERY >= (5, 7) else ("SUCCESS", "completed")
    stage.end_of(first, state)

    stage.worker.wait_for_log("Couldn't convert ETA")
    stage.wait_until_free("succeed", tag)
    stage.assert_released(first, reason)
    stage.assert_nothing_left(first)


def _deliver_changed(stage: Stage, queue: str, headers: Any = None, **changes: Any) -> None:
    """Take a message out of the queue where it waits, and give the worker a changed one."""
    message = json.loads(stage.props.redis.rpop(queue))
    message.update(changes)
    message["headers"].update(headers or {})
    stage.props.redis.lpush("celery", json.dumps(message))


def _send_by_name(stage: Stage, name: str, **call: Any) -> Any:
    result = stage.app.send_task(name, unique=True, **call)
    assert result.outcome == "created"
    return result
