"""The thread that renews, and a task that starts under its eyes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state as worker_state

from celery_unique.header import LockHeader
from celery_unique.holding import Holding
from celery_unique.leases import Leases
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.worker.renewal import Renewer

KEY = "1:00"
LEASES = Leases(
    queue_ms=86_400_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=3_600_000
)
LOCK = LockHeader("a", KEY, delivery="here/1/boot/1")


@pytest.fixture
def holding() -> Holding:
    store = MemoryStore()
    store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=LEASES.grace_ms))
    return Holding(SimpleNamespace(), store, store, LEASES)


@pytest.fixture
def request_() -> Iterator[Any]:
    """In the worker's hands, and not yet started, as far as the worker knows."""

    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    request = Request(unique_lock=LOCK, unique_started=False, name="shop.rebuild")
    worker_state.reserved_requests.add(request)
    yield request
    worker_state.reserved_requests.discard(request)


def lease_left_ms(holding: Holding) -> int:
    record, now = holding.store.read(KEY)
    return record.tasks["a"].lease - now


def test_a_task_that_starts_while_leases_are_renewed_keeps_its_own(
    holding: Holding, request_: Any
) -> None:
    """The store has let it run, and the worker is yet to hear of it: killed now, it must not leave
    a key that is held for a day by a message that is acknowledged."""
    holding.start(LOCK, "shop.rebuild", LOCK.delivery, acks_late=False)

    Renewer(SimpleNamespace(holding=holding), SimpleNamespace()).renew_once()

    assert lease_left_ms(holding) <= LEASES.run_ms


def test_a_message_that_waits_in_a_worker_is_held_for_as_long_as_one_in_the_queue(
    holding: Holding, request_: Any
) -> None:
    Renewer(SimpleNamespace(holding=holding), SimpleNamespace()).renew_once()

    assert lease_left_ms(holding) > LEASES.queue_ms - 10_000
