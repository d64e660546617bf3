"""When a worker takes it that a message may have been delivered again."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals
from celery.bootsteps import RUN

from celery_unique.config.leases import Leases
from celery_unique.header import LockHeader
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker.bootstrap import WorkerBootstrap
from celery_unique.worker.deliveries import Deliveries
from celery_unique.worker.delivery import Delivery
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.renewal import Renewer
from tests.support import eventually

LEASES = Leases(queue_ms=1, run_ms=1, grace_ms=1, retention_ms=1, visibility_ms=4_000)
LONG = Leases(queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=60_000)


def app_state_of(client: Any, leases: Leases) -> Any:
    parts = {WorkerLockClient: client, Deliveries: Deliveries()}
    return SimpleNamespace(
        part=parts.__getitem__,
        parts=parts,
        store=client.store,
        leases=leases,
        renewal=None,
        app=None,
    )


def held_for(seconds: float) -> Delivery:
    client = SimpleNamespace(leases=LEASES, store=None)
    request: Any = SimpleNamespace(delivery_info={}, task=None, eventer=None)
    delivery = Delivery.received(
        app_state_of(client, LEASES), LockHeader("a", "1:00", delivery="here/1/boot/1"), request
    )
    delivery._received_at = time.monotonic() - seconds
    return delivery


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, False), (3.8, True), (4.1, True)])
def test_a_message_held_for_nearly_the_visibility_timeout_may_exist_twice(seconds, expected):
    """Its acknowledgement is on the way while Redis gives it to another worker."""
    assert held_for(seconds).may_exist_twice() is expected


@pytest.mark.parametrize("failed", [True, False])
def test_a_message_whose_acknowledgement_failed_exists_twice(failed):
    """Celery logs the error, and does not acknowledge it again."""
    delivery = held_for(1.0)
    acknowledgement: Any = SimpleNamespace(failed=failed)
    delivery.acknowledgement = acknowledgement

    assert delivery.may_exist_twice() is failed


# -- a worker that begins to stop -------------------------------------------------------


def test_what_a_pool_takes_while_its_worker_begins_to_stop_leaves_a_done_mark():
    """Celery then forgets what it has written to a process that has not confirmed it: the process
    runs it, and its message goes back to the queue."""
    store = MemoryStore()
    holding = WorkerLockClient(SimpleNamespace(), store, store, LONG)
    lock = LockHeader("a", "1:00", delivery="here/1/boot/1")
    store.acquire(lock.key, Claim("a", "shop.rebuild", states="pswrt", grace_ms=60_000))
    holding.start(lock, "shop.rebuild", acks_late=False)
    runtime = app_state_of(holding, LONG)
    delivery = Delivery(runtime, lock, SimpleNamespace(name="shop.rebuild", acks_late=False))
    runtime.part(Deliveries).on_the_way[delivery.name] = delivery
    running: Any = SimpleNamespace(blueprint=SimpleNamespace(state=RUN), consumer=None)
    life = WorkerBootstrap(runtime, running)
    life._renewer = Renewer(runtime, running)
    life._renewer.start()
    assert not store.read(lock.key)[0].tasks["a"].copies

    signals.worker_shutting_down.connect(life._on_shutting_down)
    signals.worker_shutting_down.send(sender="here", sig="SIGTERM", how="Warm", exitcode=0)

    # Long before the next round of renewals.
    eventually(lambda: store.read(lock.key)[0].tasks["a"].copies)
    finished = holding.finish(lock, "shop.rebuild", State.COMPLETED)
    assert finished.settle
    holding.settle(lock, "shop.rebuild", State.COMPLETED)
    store.flush()
    second = replace(lock, delivery="here/2/boot/1")
    again = holding.start(second, "shop.rebuild", acks_late=False)
    assert again.verdict == "done"
    life._renewer.stop()
