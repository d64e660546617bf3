"""What becomes of a message at the gate, and of its lock at each end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.bootsteps import RUN

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.header import HEADER, LockHeader
from celery_unique.stores.base import Claim
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker import gate
from celery_unique.worker.deliveries import Deliveries
from celery_unique.worker.delivery import Delivery, DeliveryState, End, Lock
from celery_unique.worker.lock_client import WorkerLockClient

KEY = "1:00"
LEASES = Leases(
    queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=60_000
)
STATES = "pswrt"


class Request:
    """As much of Celery's request as the gate uses."""

    def __init__(self, worker: Worker, delivery_name: str, acks_late: bool, copies: bool) -> None:
        self.id, self.name = "a", "shop.rebuild"
        self.task = SimpleNamespace(name=self.name, acks_late=acks_late, send_events=False)
        self.delivery_info: dict[str, Any] = {}
        self.eventer = None
        self.request_dict: dict[str, Any] = {}
        self._context = SimpleNamespace(
            chord=None, group=None, chain=None, callbacks=None, errbacks=None
        )
        self.acts: list[str] = []
        header = LockHeader(self.id, KEY, delivery=delivery_name, copies=copies)
        self.delivery = Delivery.received(worker.app_state, header, self)
        self.unique_delivery: Delivery | None = self.delivery
        self.delivery.received_by(worker.consumer)

    def acknowledge(self) -> None:
        self.acts.append("acknowledge")

    def _announce_revoked(self, reason: str, *_: Any) -> None:
        self.acts.append(f"revoke: {reason}")


class Worker:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.store.acquire(KEY, Claim("a", "shop.rebuild", STATES, grace_ms=60_000))
        self.store.confirm(KEY, "a", 60_000)
        self.client = WorkerLockClient(SimpleNamespace(), self.store, self.store, LEASES)
        parts: dict[type, Any] = {WorkerLockClient: self.client, Deliveries: Deliveries()}
        self.app_state: Any = SimpleNamespace(
            app=SimpleNamespace(), part=parts.__getitem__, parts=parts, leases=LEASES
        )
        self.timer: list[Any] = []
        self.consumer = SimpleNamespace(
            restart_count=0,
            controller=SimpleNamespace(blueprint=SimpleNamespace(state=RUN)),
            qos=SimpleNamespace(increment_eventually=lambda: None),
            timer=SimpleNamespace(call_after=lambda s, *_, **__: self.timer.append(s)),
            apply_eta_task=None,
            pool=None,
        )

    def request(
        self,
        delivery_name: str = "here/1/boot/1",
        acks_late: bool = False,
        copies: bool = False,
    ) -> Request:
        return Request(self, delivery_name, acks_late, copies)

    def recorded(self) -> list[State]:
        self.store.flush()
        return [task.stored_state for task in self.store.read(KEY)[0].tasks.values()]


@pytest.fixture
def worker():
    return Worker()


def test_a_message_runs_and_its_header_names_the_delivery_and_the_token(worker):
    request = worker.request()

    assert gate.let_through(request, request.delivery)

    assert request.delivery.state is DeliveryState.STARTED
    header = LockHeader.from_message(request.request_dict[HEADER])
    assert (header.delivery, header.token > 0) == ("here/1/boot/1", True)
    assert worker.recorded() == [State.ACTIVE]


def test_a_second_delivery_waits_while_the_first_runs_longer_each_time(worker):
    first, second = worker.request(), worker.request("here/1/boot/2")
    gate.let_through(first, first.delivery)

    assert not gate.let_through(second, second.delivery)
    assert not gate.let_through(second, second.delivery)

    assert second.delivery.state is DeliveryState.WAITING
    assert worker.timer == [gate.WAIT_S, 2 * gate.WAIT_S]
    assert second.acts == []


def test_a_message_whose_task_has_finished_is_acknowledged_and_dropped(worker):
    first, second = worker.request(acks_late=True), worker.request("here/1/boot/2")
    gate.let_through(first, first.delivery)
    first.delivery.end_body(End.SUCCESS)
    first.delivery.settle(again=True)
    worker.store.flush()

    assert not gate.let_through(second, second.delivery)

    assert second.delivery.state is DeliveryState.DROPPED
    assert second.acts == ["acknowledge"]


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_copy_of_a_message_that_has_run_is_dropped(worker, acks_late):
    """A publish without a reply was repeated: both messages may be in the queue."""
    first = worker.request(acks_late=acks_late, copies=True)
    second = worker.request("here/1/boot/2", acks_late=acks_late)
    gate.let_through(first, first.delivery)
    first.delivery.end_body(End.SUCCESS)
    first.delivery.unsettled = True
    first.delivery.settle_with(None)
    worker.store.flush()

    assert not gate.let_through(second, second.delivery)

    assert LockHeader.from_message(first.request_dict[HEADER]).again
    assert second.delivery.state is DeliveryState.DROPPED


def test_a_superseded_message_is_announced_as_revoked(worker):
    replacing = Claim("b", "shop.rebuild", STATES, grace_ms=60_000, on_conflict="replace")
    worker.store.acquire(KEY, replacing)
    worker.store.confirm(KEY, "b", 60_000)
    request = worker.request()

    assert not gate.let_through(request, request.delivery)

    assert request.delivery.state is DeliveryState.DROPPED
    assert request.acts == ["revoke: superseded by task b"]
    assert (request.delivery.dropped_as, request.delivery.superseded_by) == (
        "superseded by task b",
        "b",
    )


def test_without_the_store_it_runs_blind(worker, monkeypatch):
    monkeypatch.setattr(worker.store, "start", _raise(StoreUnavailable("away")))
    request = worker.request()

    assert gate.let_through(request, request.delivery)

    assert request.delivery.blind
    assert request.delivery.state is DeliveryState.STARTED


def test_with_an_unreadable_record_it_runs_without_a_lock(worker, monkeypatch):
    monkeypatch.setattr(worker.store, "start", _raise(UnreadableRecord("torn", key=KEY)))
    request = worker.request()

    assert gate.let_through(request, request.delivery)

    assert request.unique_delivery is None
    assert LockHeader.from_message(request.request_dict[HEADER]).delivery == ""


def _raise(error: Exception) -> Any:
    def act(*_: Any) -> None:
        raise error

    return act


@pytest.mark.parametrize("end", End)
def test_the_lock_at_each_end_of_a_body(worker, end):
    request = worker.request()
    gate.let_through(request, request.delivery)

    request.delivery.end_body(end)

    kept = [] if end.lock is Lock.RELEASE else [State.RETRYABLE]
    assert worker.recorded() == kept
    assert request.delivery.state is DeliveryState.FINISHED
    assert (end.state is None) is (end.lock is not Lock.RELEASE)


def test_a_body_whose_id_continues_in_a_message_hands_the_lock_over(worker):
    request = worker.request()
    gate.let_through(request, request.delivery)
    request.delivery.continues_in_ms = 0

    request.delivery.end_body(End.SUCCESS)

    assert worker.recorded() == [State.RETRYABLE]


def test_a_key_is_released_once(worker, monkeypatch):
    request = worker.request()
    gate.let_through(request, request.delivery)
    request.delivery.ends_as(End.KILLED)
    request.delivery.release()
    monkeypatch.setattr(worker.store, "finish", _raise(AssertionError("released twice")))

    request.delivery.release()

    assert worker.recorded() == []
    assert request.delivery.outcome is State.DISCARDED


def test_what_the_body_has_released_is_only_settled_by_the_request(worker, monkeypatch):
    request = worker.request()
    gate.let_through(request, request.delivery)
    request.delivery.end_body(End.SUCCESS)
    monkeypatch.setattr(worker.store, "finish", _raise(AssertionError("released twice")))

    request.delivery.release()
    request.delivery.settle_with(None)

    assert request.delivery.state is DeliveryState.SETTLED


def test_a_dropped_message_releases_nothing(worker, monkeypatch):
    request = worker.request()
    request.delivery.state = DeliveryState.DROPPED
    monkeypatch.setattr(worker.store, "finish", _raise(AssertionError("released")))

    request.delivery.release()

    assert worker.recorded() == [State.AVAILABLE]


def test_a_message_that_goes_back_to_the_queue_keeps_its_key(worker):
    request = worker.request(acks_late=True)
    gate.let_through(request, request.delivery)
    request.delivery.requeued = True

    request.delivery.keep_or_release()

    assert worker.recorded() == [State.RETRYABLE]
