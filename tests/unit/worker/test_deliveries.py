"""A process of the pool that is gone before it could record a task's end."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores import retry_queue
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker import deliveries
from celery_unique.worker.deliveries import Deliveries
from celery_unique.worker.delivery import Delivery
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.renewal import Renewer
from tests.support import eventually

KEY = "1:00"
LEASES = Leases(queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=1)
DELIVERY = "here/1/boot/1"
BODY = LockHeader("a", KEY, delivery=DELIVERY, token=7)
FIRST = LockHeader("a", KEY, delivery="here/1/boot/0")
BLIND = LockHeader("a", KEY, delivery=DELIVERY)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "PATIENCE_S", -1.0)


class Worker:
    """A worker's main process: the body runs in another one."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=60_000))
        self.client = WorkerLockClient(SimpleNamespace(), self.store, self.store, LEASES)
        self.deliveries = Deliveries()
        parts: dict[type, Any] = {WorkerLockClient: self.client, Deliveries: self.deliveries}
        self.app_state: Any = SimpleNamespace(part=parts.__getitem__, parts=parts, leases=LEASES)
        self._renewer = Renewer(self.app_state, SimpleNamespace())

    def start(self) -> None:
        self.client.start(BODY, "shop.rebuild", acks_late=True)
        self.deliveries.body_began(BODY, "shop.rebuild")

    def delivery(self) -> Delivery:
        task = SimpleNamespace(name="shop.rebuild", acks_late=True)
        delivery = Delivery(self.app_state, BODY, task)
        delivery.started = True
        return delivery

    def record_ends(self) -> None:
        self._renewer.record_ends()

    def states(self) -> list[str]:
        return [task.state for task in self.store.read(KEY)[0].tasks.values()]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_its_key_is_released_by_the_main_process(worker):
    worker.start()
    worker.client.renewal_failed()

    worker.record_ends()

    assert worker.states() == []


def test_so_is_the_key_of_a_task_that_began_without_the_store(worker):
    worker.store.confirm(KEY, "a", 60_000)
    worker.deliveries.body_began(BLIND, "shop.rebuild")
    worker.client.renewal_failed()

    worker.record_ends()

    assert worker.states() == []


def test_so_is_the_key_of_a_task_that_began_just_after_the_store_was_away(worker):
    """Its process may still have skipped the store when the body ended."""
    worker.client.renewal_failed()
    worker.start()

    worker.record_ends()

    assert worker.states() == []


def test_so_is_a_key_that_a_dead_delivery_left_it(worker, monkeypatch):
    monkeypatch.setattr(retry_queue, "FIRST_PAUSE_S", 0.01)
    worker.client.leases = dataclasses.replace(LEASES, run_ms=100)
    worker.client.start(FIRST, "shop.rebuild", acks_late=True)
    worker.deliveries.body_began(BLIND, "shop.rebuild")
    worker.client.renewal_failed()

    worker.record_ends()

    eventually(lambda: worker.states() == [])


def retried(worker: Worker) -> None:
    worker.client.renewal_failed()
    worker.delivery().continues()


def requeued(worker: Worker) -> None:
    worker.client.renewal_failed()
    worker.delivery().keep()


def store_was_there(worker: Worker) -> None:
    pass


@pytest.mark.parametrize("what", [retried, requeued, store_was_there])
def test_otherwise_it_is_left_alone(worker, what):
    worker.start()
    what(worker)

    worker.record_ends()

    assert worker.states() != []


def test_a_task_that_the_worker_still_has_is_left_alone(worker):
    worker.start()
    worker.client.renewal_failed()

    unrecorded = worker.deliveries.unrecorded(worker.client.failed_at, held={DELIVERY})

    assert unrecorded == []
    assert worker.states() == ["r"]
    assert len(worker.deliveries.unrecorded(worker.client.failed_at, held=())) == 1


def test_it_is_retried_when_the_store_does_not_answer(worker, monkeypatch):
    worker.start()
    worker.client.renewal_failed()
    with monkeypatch.context() as away:
        away.setattr(worker.store, "read", _unavailable)
        with pytest.raises(StoreUnavailable):
            worker.record_ends()

    worker.record_ends()

    assert worker.states() == []


def test_an_end_that_is_recorded_is_not_recorded_again(worker):
    worker.start()
    worker.client.renewal_failed()
    worker.client.finish(BODY, "shop.rebuild", State.COMPLETED)
    worker.store.acquire(KEY, Claim("b", "shop.rebuild", states="pswrt", grace_ms=60_000))

    worker.record_ends()

    assert worker.states() == ["p"]


def _unavailable(key: str) -> None:
    raise StoreUnavailable("away")
