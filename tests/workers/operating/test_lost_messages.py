"""``release --lost`` frees a key only where it is proven that the message is gone.

On Redis every message can be seen, in a queue or with the worker that took it. RabbitMQ shows less:
see ``test_rabbitmq.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_unique import lookup
from celery_unique.publish.stale_holders.workers import query_workers
from tests.support import RedisServer, eventually
from tests.workers.operating.desk import ANSWERS_WITHIN_S, Desk, Done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROUTES = {"task_routes": {"shop.send_digest": {"queue": "digests"}}}


@pytest.fixture
def redis_desk(redis_server: RedisServer, directory: Path) -> Iterator[Desk]:
    url = redis_server.fresh_url()
    desk = Desk(url, url, directory, dict(ROUTES))
    yield desk
    desk.close()


def release_lost(desk: Desk, *more: str) -> Done:
    return desk.unique("release", "--lost", "--yes", "--json", "--timeout", ANSWERS_WITHIN_S, *more)


def call(desk: Desk, task: str, options: dict[str, Any] | None = None, /, **kwargs: Any) -> Any:
    return desk.app.send_task(f"shop.{task}", kwargs=kwargs, unique=True, **(options or {}))


def wait_until_old_enough(desk: Desk, *results: Any, age_ms: int = 2500) -> None:
    """A message that was published a moment ago may be anywhere."""

    def are_old() -> bool:
        records = [desk.store.read(result.unique_key) for result in results]
        return all(now - t.created_at > age_ms for r, now in records for t in r.tasks.values())

    eventually(are_old, timeout=30, message="no time passes")


def is_held(desk: Desk, result: Any) -> bool:
    return lookup(key=result.unique_key, app=desk.app) is not None


def unacknowledged(desk: Desk) -> int:
    with desk.app.connection_for_read() as connection:
        return int(connection.default_channel.client.hlen("unacked"))


def test_messages_in_any_queue_are_not_lost_and_purged_ones_are(redis_desk):
    """Also those in a queue that the call named and no setting does, and at any priority."""
    desk = redis_desk
    purged = [call(desk, "send_digest", user_id=n) for n in range(3)]
    kept = [
        call(desk, "rebuild_index", shop_id=1),
        call(desk, "rebuild_index", {"priority": 3}, shop_id=2),
        call(desk, "rebuild_index", {"queue": "named-by-the-call"}, shop_id=3),
        call(desk, "send_digest", {"queue": "named-by-the-call", "priority": 9}, user_id=4),
        call(desk, "rebuild_index", {"countdown": 600}, shop_id=6),
    ]
    wait_until_old_enough(desk, *purged, *kept)
    before = release_lost(desk)
    assert "Purged 3 messages" in desk.run("purge", "--force", "--queues", "digests").out

    after = release_lost(desk)

    assert (before.code, before.json()) == (
        1,
        {"matched": 0, "released": 0, "dry_run": False, "unknown": 0, "reasons": []},
    )
    assert (after.code, after.json()["released"], after.json()["unknown"]) == (0, 3, 0)
    assert not any(is_held(desk, result) for result in purged)
    assert all(is_held(desk, result) for result in kept)


@pytest.mark.versions
def test_nothing_is_released_while_a_busy_worker_does_not_answer(redis_desk):
    """The worker of another queue answers; that of the solo pool runs a task and cannot."""
    desk = redis_desk
    busy = desk.start_worker("busy", queues=["operated"], pool="solo")
    desk.start_worker("idle", queues=["elsewhere"])
    purged = call(desk, "send_digest", user_id=1)
    running = call(desk, "import_all", name="busy")
    eventually(
        lambda: desk.store.read(running.unique_key)[0].tasks[running.id].state == "r",
        timeout=30,
        message="not started",
    )
    waiting = call(desk, "rebuild_index", shop_id=1)  # in the queue of the busy worker
    wait_until_old_enough(desk, purged, waiting)
    desk.run("purge", "--force", "--queues", "digests")

    done = release_lost(desk)
    examined = desk.unique("doctor", "--json", "--timeout", ANSWERS_WITHIN_S).json()

    told = done.json()
    assert all(is_held(desk, result) for result in (purged, running, waiting))
    assert (done.code, told["released"], told["unknown"]) == (3, 0, 1)
    [reason] = told["reasons"]
    assert reason["locks"] == 1
    assert "2 workers listen" in reason["reason"]
    assert "1 replied" in reason["reason"]
    assert "lost" not in {f["check"] for f in examined["findings"] if f["level"] != "note"}
    [note] = [f for f in examined["findings"] if f["check"] == "lost"]
    assert "1 waiting task" in note["message"]
    assert "2 workers listen" in note["message"]

    # It has ended: the others are known, and answer.
    busy.kill()
    eventually(
        lambda: release_lost(desk).json()["released"] == 1, timeout=60, message="not released"
    )
    assert not is_held(desk, purged)


def test_what_a_killed_worker_had_fetched_is_not_lost_and_its_return_is_told(redis_desk):
    desk = redis_desk
    worker = desk.start_worker("killed")
    fetched = call(desk, "rebuild_index", {"countdown": 600}, shop_id=1)
    eventually(lambda: unacknowledged(desk) == 1, timeout=30, message="not fetched")
    wait_until_old_enough(desk, fetched)
    worker.kill()
    fetched_at = time.time()
    desk.start_worker("alive", queues=["elsewhere"])

    done = release_lost(desk)
    examined = desk.examine().json()

    told = done.json()
    assert (done.code, told["released"], told["unknown"]) == (3, 0, 1)
    [reason] = told["reasons"]
    assert "fetched by a worker that does not reply" in reason["reason"]
    assert "visibility timeout" in reason["reason"]
    assert abs(reason["returns_at_ms"] / 1000 - (fetched_at + 3600)) < 120
    assert is_held(desk, fetched)
    [note] = [f for f in examined["findings"] if f["check"] == "lost"]
    assert note["level"] == "note"
    assert time.strftime("%Y-%m-%d %H:", time.gmtime(reason["returns_at_ms"] / 1000)) in str(note)
    in_words = desk.unique("release", "--lost", "--yes", "--timeout", ANSWERS_WITHIN_S)
    assert "1 lock is not known to be lost" in in_words.err
    assert "visibility timeout" in in_words.err


def test_a_broker_that_cannot_be_looked_into_proves_nothing(redis_server, directory):
    desk = Desk("memory://", redis_server.fresh_url(), directory)
    try:
        result = call(desk, "send_digest", user_id=1)
        wait_until_old_enough(desk, result)

        done = release_lost(desk)

        assert (done.code, done.json()["unknown"]) == (3, 1)
        assert "memory" in done.json()["reasons"][0]["reason"]
        assert is_held(desk, result)
    finally:
        desk.close()


def test_a_worker_replies_to_each_of_several_queries_in_a_row(redis_desk):
    """The replies to a query must not go to the connection on which an earlier one waited."""
    redis_desk.start_worker("w1")

    replied = [set(query_workers(redis_desk.app, 0.5).replies) for _ in range(5)]

    assert replied == [replied[0]] * 5
    assert len(replied[0]) == 1
