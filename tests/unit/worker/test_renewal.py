"""The thread that renews, and a task that starts under its eyes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state as worker_state

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores.base import Claim, Held
from celery_unique.stores.memory import MemoryStore
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.renewal import Renewer

KEY = "1:00"
LEASES = Leases(
    queue_ms=86_400_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=3_600_000
)
LOCK = LockHeader("a", KEY, delivery="here/1/boot/1")


def renewer(holding: WorkerLockClient) -> Renewer:
    app_state: Any = SimpleNamespace(part=lambda _: holding, leases=holding.leases)
    return Renewer(app_state, SimpleNamespace())


@pytest.fixture
def holding() -> WorkerLockClient:
    store = MemoryStore()
    store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=LEASES.grace_ms))
    return WorkerLockClient(SimpleNamespace(), store, store, LEASES)


class RequestStub(SimpleNamespace):
    __hash__ = object.__hash__

    def has_continuations(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def no_requests_are_left() -> Iterator[None]:
    before = set(worker_state.reserved_requests)
    yield
    worker_state.reserved_requests.intersection_update(before)


@pytest.fixture
def request_() -> Any:
    """In the worker's hands, and not yet started, as far as the worker knows."""

    request = RequestStub(unique_lock=LOCK, unique_started=False, name="shop.rebuild")
    worker_state.reserved_requests.add(request)
    return request


def lease_left_ms(holding: WorkerLockClient) -> int:
    record, now = holding.store.read(KEY)
    return record.tasks["a"].lease - now


def test_a_task_that_starts_while_leases_are_renewed_keeps_its_own(holding, request_):
    """The store has let it run, and the worker is yet to hear of it: killed now, it must not leave
    a key that is held for a day by a message that is acknowledged."""
    holding.start(LOCK, "shop.rebuild", LOCK.delivery, acks_late=False)

    renewer(holding).renew_once()

    assert lease_left_ms(holding) <= LEASES.run_ms


def test_a_message_that_waits_in_a_worker_is_held_for_as_long_as_one_in_the_queue(
    holding, request_
):
    renewer(holding).renew_once()

    assert lease_left_ms(holding) > LEASES.queue_ms - 10_000


class OneBadKey(MemoryStore):
    """Whoever renews this key fails, and with it all that is asked for at once."""

    bad = "1:bad"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def renew(self, held: Sequence[Held]) -> list[bool]:
        self.asked.append([one.key for one in held])
        if self.bad in self.asked[-1]:
            raise StoreUnavailable("this key is busy", store="memory")
        return super().renew(held)


def test_a_key_that_cannot_be_renewed_keeps_no_other_from_it():
    store = OneBadKey()
    holding = WorkerLockClient(SimpleNamespace(), store, store, LEASES)
    keys = [f"1:{n}" for n in range(250)]
    keys.insert(130, store.bad)
    requests = []
    for key in keys:
        store.acquire(key, Claim("a", "shop.rebuild", states="pswrt", grace_ms=LEASES.grace_ms))
        lock = LockHeader("a", key, delivery=f"here/1/boot/{key}")
        holding.start(lock, "shop.rebuild", lock.delivery, acks_late=False)
        task = SimpleNamespace(acks_late=False)
        request = RequestStub(unique_lock=lock, unique_started=True, name="shop.rebuild", task=task)
        requests.append(request)
        worker_state.reserved_requests.add(request)
    store.clock_offset_ms = LEASES.run_ms // 2

    with pytest.raises(StoreUnavailable):
        renewer(holding).renew_once()

    left = {}
    for key in keys:
        record, now = store.read(key)
        left[key] = record.tasks["a"].lease - now
    assert {key for key in keys if left[key] <= LEASES.run_ms // 2} == {store.bad}
    assert max(map(len, store.asked)) <= 100
    assert len(store.asked) < 25  # halves, not one by one


def test_what_runs_is_renewed_before_what_only_waits(holding, request_):
    store = OneBadKey()
    holding.store = store
    running = RequestStub(
        unique_lock=LockHeader("b", "1:runs", delivery="here/1/boot/2"),
        unique_started=True,
        name="shop.rebuild",
        task=SimpleNamespace(acks_late=False),
        unique_alive_at=time.monotonic(),
    )
    worker_state.reserved_requests.add(running)

    renewer(holding).renew_once()

    assert store.asked == [["1:runs"], [KEY]]
