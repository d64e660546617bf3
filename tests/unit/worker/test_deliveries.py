"""A process of the pool that is gone before it could tell the store of a task's end."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores import retry_queue as later
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker import deliveries as ends
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import eventually

KEY = "1:00"
LEASES = Leases(queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=1)
DELIVERY = "here/1/boot/1"
BODY = LockHeader("a", KEY, delivery=DELIVERY, token=7)
FIRST = LockHeader("a", KEY, delivery="here/1/boot/0")
BLIND = LockHeader("a", KEY, delivery=DELIVERY)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "PATIENCE_S", -1.0)


@pytest.fixture
def holding() -> WorkerLockClient:
    """As in a worker's main process: the body runs in another one."""
    store = MemoryStore()
    store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=60_000))
    return WorkerLockClient(SimpleNamespace(), store, store, LEASES)


def start(holding: WorkerLockClient) -> None:
    holding.start(BODY, "shop.rebuild", DELIVERY, acks_late=True)
    holding.taken_by_pool(BODY, "shop.rebuild")


def states(holding: WorkerLockClient) -> list[str]:
    return [task.state for task in holding.store.read(KEY)[0].tasks.values()]


def test_its_key_is_given_back_by_the_main_process(holding):
    start(holding)
    holding.renewal_failed()

    holding.ends.look(holding, held=())

    assert states(holding) == []


def test_so_is_the_key_of_a_task_that_began_without_the_store(holding):
    holding.store.confirm(KEY, "a", 60_000)
    holding.taken_by_pool(BLIND, "shop.rebuild")
    holding.renewal_failed()

    holding.ends.look(holding, held=())

    assert states(holding) == []


def test_so_is_the_key_of_a_task_that_began_just_after_the_store_was_away(holding):
    """Its process may still have left the store alone when the body ended."""
    holding.renewal_failed()
    start(holding)

    holding.ends.look(holding, held=())

    assert states(holding) == []


def test_so_is_a_key_that_a_dead_delivery_left_it(holding, monkeypatch):
    monkeypatch.setattr(later, "FIRST_PAUSE_S", 0.01)
    holding.leases = dataclasses.replace(LEASES, run_ms=100)
    holding.start(FIRST, "shop.rebuild", FIRST.delivery, acks_late=True)
    holding.taken_by_pool(BLIND, "shop.rebuild")
    holding.renewal_failed()

    holding.ends.look(holding, held=())

    eventually(lambda: states(holding) == [])


def retried(holding: WorkerLockClient) -> None:
    holding.renewal_failed()
    holding.ends.goes_on(DELIVERY)


def requeued(holding: WorkerLockClient) -> None:
    holding.renewal_failed()
    holding.retried(BODY, "shop.rebuild", 0, copies=True)


def store_was_there(holding: WorkerLockClient) -> None:
    pass


@pytest.mark.parametrize("what", [retried, requeued, store_was_there])
def test_otherwise_it_is_left_alone(holding, what):
    start(holding)
    what(holding)

    holding.ends.look(holding, held=())

    assert states(holding) != []


def test_a_task_that_the_worker_still_has_is_left_alone(holding):
    start(holding)
    holding.renewal_failed()

    holding.ends.look(holding, held={DELIVERY})

    assert states(holding) == ["r"]


def test_it_is_tried_again_when_the_store_does_not_answer(holding, monkeypatch):
    start(holding)
    holding.renewal_failed()
    with monkeypatch.context() as away:
        away.setattr(holding.store, "read", _unavailable)
        with pytest.raises(StoreUnavailable):
            holding.ends.look(holding, held=())

    holding.ends.look(holding, held=())

    assert states(holding) == []


def test_an_end_that_was_told_is_not_told_again(holding):
    start(holding)
    holding.renewal_failed()
    holding.finish(BODY, "shop.rebuild", State.COMPLETED)
    holding.store.acquire(KEY, Claim("b", "shop.rebuild", states="pswrt", grace_ms=60_000))

    holding.ends.look(holding, held=())

    assert states(holding) == ["p"]


def _unavailable(key: str) -> None:
    raise StoreUnavailable("away")
