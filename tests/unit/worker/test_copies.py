"""When a worker takes it that a message may have been delivered again."""

from __future__ import annotations

import time
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
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.renewal import Renewer
from celery_unique.worker.request import UniqueRequestMixin
from tests.support import eventually

LEASES = Leases(queue_ms=1, run_ms=1, grace_ms=1, retention_ms=1, visibility_ms=4_000)
LONG = Leases(queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=60_000)


def held_for(seconds: float) -> Any:
    return SimpleNamespace(
        delivery_info={},
        unique_consumer=None,
        _unique_acknowledgement=None,
        _unique_received_at=time.monotonic() - seconds,
        _app_state=SimpleNamespace(leases=LEASES),
    )


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, False), (3.8, True), (4.1, True)])
def test_a_message_held_for_nearly_the_visibility_timeout_may_exist_twice(seconds, expected):
    """Its acknowledgement is on the way while Redis gives it to another worker."""
    assert UniqueRequestMixin._may_exist_twice(held_for(seconds)) is expected


@pytest.mark.parametrize("failed", [True, False])
def test_a_message_whose_acknowledgement_failed_exists_twice(failed):
    """Celery logs the error, and does not acknowledge it again."""
    request = held_for(1.0)
    request._unique_acknowledgement = SimpleNamespace(failed=failed)

    assert UniqueRequestMixin._may_exist_twice(request) is failed


# -- a worker that begins to stop -------------------------------------------------------


def test_what_a_pool_takes_while_its_worker_begins_to_stop_leaves_a_done_mark():
    """Celery then forgets what it has written to a process and not heard to be taken: the process
    runs it, and its message goes back to the queue."""
    store = MemoryStore()
    holding = WorkerLockClient(SimpleNamespace(), store, store, LONG)
    lock = LockHeader("a", "1:00", delivery="here/1/boot/1")
    store.acquire(lock.key, Claim("a", "shop.rebuild", states="pswrt", grace_ms=60_000))
    holding.start(lock, "shop.rebuild", lock.delivery, acks_late=False)
    holding.sent_to_pool(lock, "shop.rebuild")
    runtime: Any = SimpleNamespace(
        part=lambda _: holding, store=store, leases=LONG, renewal=None, app=None
    )
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
    again = holding.start(lock, "shop.rebuild", "here/2/boot/1", acks_late=False)
    assert again.verdict == "done"
    life._renewer.stop()
