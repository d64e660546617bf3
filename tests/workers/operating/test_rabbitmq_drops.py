"""RabbitMQ drops messages by itself: the key of such a task stays taken until it is released."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

import celery_unique
from celery_unique import lookup, release
from celery_unique.config.app_state import state_of
from tests.support import eventually

DROPS: dict[str, dict[str, Any]] = {
    "ttl": {"x-message-ttl": 1},
    "max-length": {"x-max-length": 1},
    "unroutable": {},
}


@pytest.mark.parametrize("drop", DROPS)
def test_a_message_that_rabbitmq_drops_keeps_its_key_until_that_is_released(
    drop, rabbitmq_url, redis_url
):
    name = f"drops-{uuid.uuid4().hex[:8]}"
    app = Celery(name, broker=rabbitmq_url, set_as_current=False)
    queue = Queue(name, Exchange(name), routing_key=name, queue_arguments=DROPS[drop])
    app.conf.update(task_queues=[queue], task_default_queue=name, task_default_exchange=name)
    app.conf.update(task_default_routing_key=name)
    celery_unique.install(app, store_url=redis_url)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(number: int) -> None: ...

    with app.connection_for_write() as connection:
        bound = queue(connection.default_channel)
        bound.declare()
        nowhere = {"exchange": name, "routing_key": "nowhere"} if drop == "unroutable" else {}

        first = rebuild.apply_async((7,), **nowhere)
        if drop == "max-length":
            rebuild.delay(8)  # pushes the oldest one out
        left = 1 if drop == "max-length" else 0

        eventually(lambda: bound.queue_declare(passive=True).message_count == left, timeout=30)
        state_of(app).store.flush()
        again = rebuild.delay(7)
        lock = lookup(rebuild, (7,))
        assert (again.id, again.deduplicated) == (first.id, True)
        assert lock is not None
        assert lock.state == "available"
        assert (lock.expires_at - lock.created_at).total_seconds() > 23 * 3600

        assert release(rebuild, (7,))
        assert rebuild.delay(7).outcome == "created"
        bound.delete()
    state_of(app).store.close()
