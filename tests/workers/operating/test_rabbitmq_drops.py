"""RabbitMQ drops messages by itself: the key of such a task stays taken until it is released, by
hand or by a call that proves the loss."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

import celery_unique
from celery_unique import lookup, release, unique_lost
from celery_unique.config.app_state import state_of
from celery_unique.publish.stale_holders import healing
from tests.support import eventually

DROPS: dict[str, dict[str, Any]] = {
    "ttl": {"x-message-ttl": 1},
    "max-length": {"x-max-length": 1},
    "unroutable": {},
}


Make = Callable[..., tuple[Any, Queue]]


@pytest.fixture
def make(rabbitmq_url: str, redis_url: str) -> Iterator[Make]:
    """``make(arguments, **settings)``: a unique task, and its queue with these arguments."""
    made: list[tuple[Celery, Any]] = []

    def make_task(arguments: dict[str, Any], **settings: Any) -> tuple[Any, Queue]:
        name = f"drops-{uuid.uuid4().hex[:8]}"
        app = Celery(name, broker=rabbitmq_url, set_as_current=False)
        queue = Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)
        app.conf.update(task_queues=[queue], task_default_queue=name, task_default_exchange=name)
        app.conf.update(task_default_routing_key=name)
        celery_unique.install(app, store_url=redis_url, **settings)

        @app.task(name="shop.rebuild", unique=True)
        def rebuild(number: int) -> None: ...

        bound = queue(app.connection_for_write().default_channel)
        bound.declare()
        made.append((app, bound))
        return rebuild, bound

    yield make_task
    for app, bound in made:
        bound.delete()
        bound.channel.connection.client.close()
        state_of(app).store.close()


@pytest.mark.parametrize("drop", DROPS)
def test_a_message_that_rabbitmq_drops_keeps_its_key_until_that_is_released(drop, make):
    rebuild, queue = make(DROPS[drop])
    elsewhere = {"exchange": queue.name, "routing_key": "nowhere"} if drop == "unroutable" else {}

    first = rebuild.apply_async((7,), **elsewhere)
    if drop == "max-length":
        rebuild.delay(8)  # pushes the oldest one out
    left = 1 if drop == "max-length" else 0

    eventually(lambda: queue.queue_declare(passive=True).message_count == left, timeout=30)
    state_of(rebuild.app).store.flush()
    again = rebuild.delay(7)
    lock = lookup(rebuild, (7,))
    assert (again.id, again.deduplicated) == (first.id, True)
    assert lock is not None
    assert lock.state == "available"
    assert (lock.expires_at - lock.created_at).total_seconds() > 23 * 3600

    assert release(rebuild, (7,))
    assert rebuild.delay(7).outcome == "created"


def test_a_call_releases_the_key_of_a_message_that_rabbitmq_has_dropped(make, monkeypatch):
    monkeypatch.setattr(healing, "PAUSE_S", 0)
    rebuild, _ = make(DROPS["ttl"], check_after=0.5, run_lease=1)
    lost: list[dict[str, Any]] = []

    def note(**facts: Any) -> None:
        lost.append(facts)

    unique_lost.connect(note)
    first = rebuild.delay(7)

    eventually(lambda: rebuild.delay(7).outcome == "created", timeout=60)

    assert [facts["task_id"] for facts in lost] == [first.id]
    assert "neither the broker nor a worker has its message" in lost[0]["reason"]
