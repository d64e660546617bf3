"""Which messages are gone, where the broker is RabbitMQ and tells less than Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_unique import lookup
from tests.acceptance.operating.desk import Desk
from tests.kit import RabbitMQServer, RedisServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def rabbit_desk(
    rabbitmq_server: RabbitMQServer, redis_server: RedisServer, directory: Path
) -> Iterator[Desk]:
    routes = {"task_routes": {"shop.send_digest": {"queue": "slow"}}}
    desk = Desk(rabbitmq_server.fresh_url(), redis_server.fresh_url(), directory, routes)
    yield desk
    desk.close()


def test_release_of_lost_messages_leaves_those_that_a_worker_has(rabbit_desk: Desk) -> None:
    desk = rabbit_desk
    worker = desk.start_worker("rabbit")
    lost = desk.app.send_task("shop.send_digest", kwargs={"user_id": 1}, unique=True)
    held = desk.app.send_task(
        "shop.rebuild_index", kwargs={"shop_id": 1}, unique=True, countdown=600
    )
    eventually(lambda: held.id in held_ids(desk), timeout=30, message="not received")
    eventually(lambda: is_old_enough(desk, lost.unique_key), timeout=30, message="no time passes")
    release = ("release", "--lost", "--yes", "--timeout", "4")

    in_its_queue = desk.unique(*release)
    purge = desk.run("purge", "--force", "--queues", "slow")
    gone = desk.unique(*release, "--json")

    assert in_its_queue.code == 1, in_its_queue.out
    assert "Purged 1 message" in purge.out
    assert gone.json() == {"matched": 1, "released": 1, "dry_run": False}
    assert lookup(key=lost.unique_key, app=desk.app) is None
    assert lookup(key=held.unique_key, app=desk.app) is not None

    # It has the message, and does not answer: nobody can tell what is gone.
    worker.sigstop()
    unknown = desk.unique("release", "--lost", "--yes", "--timeout", "1")

    assert unknown.code == 3
    assert "queue operated has 1 consumers, and 0 workers have told" in unknown.err
    assert lookup(key=held.unique_key, app=desk.app) is not None


def held_ids(desk: Desk) -> set[str]:
    replies = desk.app.control.broadcast("unique_held", reply=True, timeout=5, limit=1) or []
    return {held["task_id"] for reply in replies for one in reply.values() for held in one["held"]}


def is_old_enough(desk: Desk, key: str) -> bool:
    record, now = desk.store.read(key)
    return all(now - task.created_at > 2500 for task in record.tasks.values())
