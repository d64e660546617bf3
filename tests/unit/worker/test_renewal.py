"""The thread that renews, and a task that starts under its eyes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from celery.worker import state as worker_state

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores.base import Claim, Held
from celery_unique.stores.memory import MemoryStore
from celery_unique.worker.deliveries import Deliveries
from celery_unique.worker.delivery import Delivery
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.renewal import Renewer

KEY = "1:00"
LEASES = Leases(
    queue_ms=86_400_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=3_600_000
)
LOCK = LockHeader("a", KEY, delivery="here/1/boot/1")


def renewer(holding: WorkerLockClient) -> Renewer:
    return Renewer(app_state_of(holding), SimpleNamespace())


def app_state_of(holding: WorkerLockClient) -> Any:
    parts: dict[type, Any] = {WorkerLockClient: holding, Deliveries: Deliveries()}
    return SimpleNamespace(
        part=parts.__getitem__, parts=parts, leases=LEASES, results_by_message=False
    )


@pytest.fixture
def holding() -> WorkerLockClient:
    store = MemoryStore()
    store.acquire(KEY, Claim("a", "shop.rebuild", states="pswrt", grace_ms=LEASES.grace_ms))
    return WorkerLockClient(SimpleNamespace(), store, store, LEASES)


class RequestStub(SimpleNamespace):
    __hash__ = object.__hash__

    delivery_info: ClassVar[dict[str, Any]] = {}
    request_dict: ClassVar[dict[str, Any]] = {}
    _payload = ((), {}, {})
    name = "shop.rebuild"
    eventer = None
    task = SimpleNamespace(name="shop.rebuild", acks_late=False)


def in_a_worker(holding: WorkerLockClient, lock: LockHeader, *, started: bool) -> RequestStub:
    request = RequestStub()
    request.unique_delivery = Delivery.received(app_state_of(holding), lock, request)
    if started:
        request.unique_delivery.start(token=1)
        request.unique_delivery.alive_at = time.monotonic()
    worker_state.reserved_requests.add(request)
    return request


@pytest.fixture(autouse=True)
def no_requests_are_left() -> Iterator[None]:
    before = set(worker_state.reserved_requests)
    yield
    worker_state.reserved_requests.intersection_update(before)


@pytest.fixture
def request_(holding: WorkerLockClient) -> Any:
    """In the worker's hands, and not yet started, as far as the worker knows."""
    return in_a_worker(holding, LOCK, started=False)


def lease_left_ms(holding: WorkerLockClient) -> int:
    record, now = holding.store.read(KEY)
    return record.tasks["a"].lease - now


def test_a_task_that_starts_while_leases_are_renewed_keeps_its_own(holding, request_):
    """The store has let it run, and the worker is yet to hear of it: killed now, it must not leave
    a key that is held for a day by a message that is acknowledged."""
    holding.start(LOCK, "shop.rebuild", acks_late=False)

    renewer(holding).renew_once()

    assert lease_left_ms(holding) <= LEASES.run_ms


def test_a_message_that_waits_in_a_worker_is_held_for_as_long_as_one_in_the_queue(
    holding, request_
):
    renewer(holding).renew_once()

    assert lease_left_ms(holding) > LEASES.queue_ms - 10_000


class OneBadKey(MemoryStore):
    """A renewal of this key fails, and with it all of its batch."""

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
        holding.start(lock, "shop.rebuild", acks_late=False)
        requests.append(in_a_worker(holding, lock, started=True))
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
    lock = LockHeader("b", "1:runs", delivery="here/1/boot/2")
    running = in_a_worker(holding, lock, started=True)

    renewer(holding).renew_once()

    assert running.unique_delivery.started

    assert store.asked == [["1:runs"], [KEY]]
