"""How much a worker sweeps at a time, in a store that does not expire by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_unique.config.leases import Leases
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.worker import renewal

MINUTE = 60_000
LEASES = Leases(queue_ms=MINUTE, run_ms=3 * MINUTE, grace_ms=1_000, retention_ms=1, visibility_ms=1)


@pytest.fixture
def store() -> MemoryStore:
    """Holds two batches and a half of lapsed locks."""
    store = MemoryStore()
    for number in range(renewal.SWEEP_BATCH * 5 // 2):
        store.acquire(f"1:{number}", Claim(f"{number}", "shop.rebuild", "pswrt", grace_ms=1_000))
    store.clock_offset_ms += MINUTE
    return store


def sweep_once(store: MemoryStore) -> None:
    runtime = SimpleNamespace(part=lambda _: SimpleNamespace(store=store), leases=LEASES)
    renewal.Renewer(runtime, worker=None)._maybe_sweep()


def test_a_worker_sweeps_until_nothing_is_left(store):
    sweep_once(store)

    assert store.sweep(10_000) == 0


def test_it_leaves_the_rest_for_later_when_that_takes_long(store, monkeypatch):
    monkeypatch.setattr(renewal, "SWEEP_AT_MOST_S", 0.0)

    sweep_once(store)

    assert store.sweep(10_000) == renewal.SWEEP_BATCH * 3 // 2
