"""What a worker says of a message that comes from elsewhere."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from celery_unique.config.leases import Leases
from celery_unique.header import LockHeader
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.worker.lock_client import WorkerLockClient

LEASES = Leases(queue_ms=60_000, run_ms=10_000, grace_ms=1_000, retention_ms=1, visibility_ms=1)


def holding() -> WorkerLockClient:
    store = MemoryStore()
    return WorkerLockClient(SimpleNamespace(), store, store, LEASES)


def start(holding: WorkerLockClient, task_id: str, store: str) -> None:
    header = LockHeader(task_id, "1:00", store=store, delivery=f"here/1/boot/{task_id}")
    holding.start(header, "shop.rebuild", acks_late=False)


def test_a_lock_in_another_store_is_said_once(caplog):
    worker = holding()

    with caplog.at_level(logging.WARNING):
        start(worker, "a", "elsewhere")
        start(worker, "b", "elsewhere")

    assert sum("another store" in message for message in caplog.messages) == 1


def test_a_lock_that_is_found_is_in_the_same_store_whatever_its_address(caplog):
    """``localhost`` and ``127.0.0.1`` make two fingerprints of one store."""
    worker = holding()
    worker.store.acquire("1:00", Claim("a", "shop.rebuild", "pwr", grace_ms=60_000))

    with caplog.at_level(logging.WARNING):
        start(worker, "a", "by-another-address")
        start(worker, "b", "by-another-address")  # its lock has lapsed: said of that lock alone

    assert not any("another store" in message for message in caplog.messages)


@pytest.mark.parametrize("fingerprint", ["", "memory"])
def test_a_lock_in_the_same_store_is_not_worth_a_word(caplog, fingerprint):
    worker = holding()

    with caplog.at_level(logging.WARNING):
        start(worker, "a", fingerprint)

    assert not any("another store" in message for message in caplog.messages)
