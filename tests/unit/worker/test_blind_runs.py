"""Tasks that ran without asking the gate, since the store was away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores import retry_queue as later
from celery_unique.stores.base import Claim, Held
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import eventually

KEY = "1:00"
RUN_MS = 100
LEASES = Leases(queue_ms=3_600_000, run_ms=RUN_MS, grace_ms=1_000, retention_ms=1, visibility_ms=1)
FIRST = LockHeader("a", KEY, delivery="here/1/boot/1")
#: Its retry, let through by a gate that could not ask.
BLIND = LockHeader("a", KEY, delivery="here/1/boot/2")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def holding(store: MemoryStore) -> WorkerLockClient:
    """The first delivery runs; the store has no record of the retry that it sent."""
    store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=LEASES.grace_ms))
    holding = WorkerLockClient(SimpleNamespace(), store, store, LEASES)
    holding.start(FIRST, "shop.rebuild", acks_late=True)
    return holding


def test_the_key_is_released_when_the_delivery_that_has_it_proves_dead(holding, store):
    holding.finish(BLIND, "shop.rebuild", State.COMPLETED)

    eventually(lambda: not store.read(KEY)[0].tasks, message="the key is still taken")


def test_the_key_of_a_delivery_that_is_alive_is_left_alone(holding, store):
    holding.finish(BLIND, "shop.rebuild", State.COMPLETED)

    alive = Held(KEY, "a", FIRST.delivery, LEASES.queue_ms, RUN_MS)
    eventually(
        lambda: not store.renew([alive])[0] or holding.retry_queue.waiting() == 0, interval=0.01
    )
    assert store.read(KEY)[0].tasks["a"].delivery == FIRST.delivery


def test_an_act_that_is_retried_is_retried_until_it_has_surely_arrived(holding, store, monkeypatch):
    """Fire-and-forget into a connection that is being cut, it is lost without an error."""
    sent, retry = [], store.retry
    replies = iter([StoreUnavailable("away")])

    def retry_one_way(*facts: Any) -> None:
        sent.append(facts)
        for error in replies:
            raise error
        if len(sent) > 2:
            retry(*facts)

    def flush() -> None:
        if len(sent) == 2:
            raise StoreUnavailable("the connection broke")

    monkeypatch.setattr(store, "retry", retry_one_way)
    monkeypatch.setattr(store, "flush", flush)
    holding.retry(FIRST, "shop.rebuild", 0, copies=True)

    eventually(lambda: store.read(KEY)[0].tasks["a"].state == "t", message="not recorded")
    assert len(sent) == 3
