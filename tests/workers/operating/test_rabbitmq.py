"""Which messages are lost, where the broker is RabbitMQ and shows less than Redis."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_unique import lookup
from tests.support import RabbitMQServer, RedisServer, eventually
from tests.workers.operating.desk import Desk, Done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Short, since a lease that was renewed within it is the sign of a worker that may hold a message.
RUN_LEASE_S = 2


@pytest.fixture
def make_desk(
    rabbitmq_server: RabbitMQServer, redis_server: RedisServer, directory: Path
) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(**conf: Any) -> Desk:
        conf = {
            "task_routes": {"shop.send_digest": {"queue": "slow"}},
            "unique_run_lease": RUN_LEASE_S,
            **conf,
        }
        made.append(Desk(rabbitmq_server.fresh_url(), redis_server.fresh_url(), directory, conf))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


def release_lost(desk: Desk, *more: str, timeout: str = "4") -> Done:
    return desk.unique("release", "--lost", "--yes", "--timeout", timeout, *more)


def send(desk: Desk, task: str, /, **kwargs: Any) -> Any:
    options = kwargs.pop("options", {})
    return desk.app.send_task(f"shop.{task}", kwargs=kwargs, unique=True, **options)


def test_release_of_lost_messages_leaves_those_that_a_worker_has(make_desk):
    desk = make_desk()
    worker = desk.start_worker("rabbit")
    lost = send(desk, "send_digest", user_id=1)
    elsewhere = send(desk, "send_digest", user_id=2, options={"queue": "named-by-the-call"})
    held = send(desk, "rebuild_index", shop_id=1, options={"countdown": 600})
    eventually(lambda: held.id in held_ids(desk), timeout=30, message="not received")
    wait_until_old_enough(desk, lost, elsewhere)

    in_its_queue = release_lost(desk, "--json").json()
    assert is_held(desk, elsewhere)  # its message waits where nobody consumes
    purge = desk.run("purge", "--force", "--queues", "slow")
    gone = release_lost(desk, "--json").json()

    assert in_its_queue["released"] == 0
    assert "Purged 1 message" in purge.out
    assert (gone["matched"], gone["released"], gone["unknown"]) == (1, 1, 1)
    assert gone["reasons"][0]["reason"] == "its call named a queue, which is not recorded"
    assert not is_held(desk, lost)
    assert is_held(desk, elsewhere)  # its message waits where nobody consumes
    assert is_held(desk, held)

    # It has the message, and does not answer: nobody can tell what is gone.
    worker.sigstop()
    unknown = release_lost(desk, timeout="1")

    assert unknown.code == 3
    assert "queue operated has 1 consumers, and 0 of them replied" in unknown.err
    assert is_held(desk, held)


@pytest.mark.versions
def test_a_message_in_a_native_delay_queue_is_not_lost(make_desk):
    """With quorum queues, RabbitMQ and not a worker holds a message until its ETA."""
    desk = make_desk(task_default_queue_type="quorum", task_default_exchange_type="topic")
    desk.start_worker("quorum")
    delayed = send(desk, "rebuild_index", shop_id=1, options={"countdown": 600})
    purged = send(desk, "send_digest", user_id=1)
    wait_until_old_enough(desk, purged)
    assert delayed.id not in held_ids(desk)
    assert "Purged 1 message" in desk.run("purge", "--force", "--queues", "slow").out

    done = release_lost(desk, "--json").json()
    examined = desk.examine().json()

    assert is_held(desk, delayed)
    assert (done["released"], done["unknown"]) == (1, 1)
    assert "delay queues (celery_delayed_*)" in done["reasons"][0]["reason"]
    assert not is_held(desk, purged)
    assert [f["level"] for f in examined["findings"] if f["check"] == "lost"] == ["note"]


def test_what_a_busy_worker_may_hold_is_not_lost_when_another_one_answers(make_desk):
    desk = make_desk()
    # The task it runs has a lease of its own; what it fetched besides is renewed by its thread.
    desk.start_worker("busy", queues=["operated"], pool="solo")
    desk.start_worker("idle", queues=["elsewhere"])
    running = send(desk, "import_all", name="busy")
    eventually(lambda: state_of(desk, running) == "active", timeout=30, message="not started")
    fetched = send(desk, "rebuild_index", shop_id=1)
    wait_until_old_enough(desk, fetched)

    done = release_lost(desk, "--json", timeout="2")

    assert is_held(desk, fetched)
    told = done.json()
    assert (done.code, told["released"], told["unknown"]) == (3, 0, 1)
    assert "queue operated has 1 consumers, and 0 of them replied" in told["reasons"][0]["reason"]


@pytest.mark.versions
def test_what_a_stopping_worker_holds_is_not_lost(make_desk):
    """It consumes no more and does not answer; that it renews its leases is all that shows."""
    desk = make_desk()
    worker = desk.start_worker("stopping")
    desk.app.control.rate_limit("shop.rebuild_index", "1/h", reply=True, timeout=10, limit=1)
    running = send(desk, "import_all", name="stopping")
    eventually(lambda: state_of(desk, running) == "active", timeout=30, message="not started")
    send(desk, "rebuild_index", shop_id=0)  # the one of this hour
    limited = send(desk, "rebuild_index", shop_id=1)
    scheduled = send(desk, "rebuild_index", shop_id=2, options={"countdown": 600})
    fetched = {limited.id, scheduled.id}
    eventually(lambda: fetched <= held_ids(desk), timeout=30, message="not received")
    wait_until_old_enough(desk, limited, scheduled)
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: consumers(desk) == 0, timeout=30, message="it still consumes")

    done = release_lost(desk, "--json", timeout="1")

    assert is_held(desk, limited)
    assert is_held(desk, scheduled)
    told = done.json()
    assert (done.code, told["released"], told["unknown"]) == (3, 0, 2)
    for reason in told["reasons"]:
        assert "that is stopping may hold it unseen" in reason["reason"]


def consumers(desk: Desk) -> int:
    with desk.app.connection_for_read() as connection:
        declared = connection.default_channel.queue_declare(queue="operated", passive=True)
        return int(declared.consumer_count)


def is_held(desk: Desk, result: Any) -> bool:
    return lookup(key=result.unique_key, app=desk.app) is not None


def state_of(desk: Desk, result: Any) -> str | None:
    lock = lookup(key=result.unique_key, app=desk.app)
    return lock.state if lock else None


def held_ids(desk: Desk) -> set[str]:
    replies = desk.app.control.broadcast("unique_held", reply=True, timeout=5, limit=1) or []
    return {held["task_id"] for reply in replies for one in reply.values() for held in one["held"]}


def wait_until_old_enough(desk: Desk, *results: Any) -> None:
    def are_old() -> bool:
        records = [desk.store.read(result.unique_key) for result in results]
        return all(
            now - task.created_at > RUN_LEASE_S * 1000 + 1000
            for record, now in records
            for task in record.tasks.values()
        )

    eventually(are_old, timeout=30, message="no time passes")
