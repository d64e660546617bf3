"""What a worker says of a message that comes from elsewhere, and an end that is recorded late."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores import circuit_breaker
from celery_unique.stores.base import Called, Claim, Finish, Finished, Held
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker import lock_client
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import eventually

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


# -- an end that is recorded late -----------------------------------------------------------


class AwayStore(MemoryStore):
    """Does not answer while ``is_away``."""

    is_away = False

    def finish(self, key: str, finish: Finish) -> Finished:
        if self.is_away:
            raise StoreUnavailable("away")
        return super().finish(key, finish)

    def read(self, key: str) -> object:  # type: ignore[override]
        if self.is_away:
            raise StoreUnavailable("away")
        return super().read(key)


def runs_late() -> tuple[AwayStore, WorkerLockClient, WorkerLockClient, LockHeader]:
    """A late acknowledged task that runs: its store, the client of the worker's main process, that
    of the process that runs it, and its header."""
    store = AwayStore()
    store.acquire("1:00", Claim("a", "shop.rebuild", "pwr", grace_ms=60_000))
    main, body = (WorkerLockClient(SimpleNamespace(), store, store, LEASES) for _ in range(2))
    header = LockHeader("a", "1:00", delivery="here/1/boot/1")
    header.token = main.start(header, "shop.rebuild", acks_late=True).token
    return store, main, body, header


def redelivered(client: WorkerLockClient) -> str:
    header = LockHeader("a", "1:00", delivery="here/1/boot/2")
    started = client.start(header, "shop.rebuild", acks_late=True)
    assert not started.lost, "it starts without a record"
    return started.verdict


def end_without_the_store(store: AwayStore, body: WorkerLockClient, header: LockHeader) -> None:
    store.is_away = True
    ended = State.COMPLETED
    assert body.finish(header, "shop.rebuild", ended, settle_later=True, acks_late=True) is None


def test_a_late_end_stays_recorded_until_the_acknowledgement_is_known():
    """The store is the broker, too, and was restarted: the message is not acknowledged."""
    store, main, body, header = runs_late()
    end_without_the_store(store, body, header)

    store.is_away = False
    eventually(lambda: body.retry_queue.waiting() == 1 and store.read("1:00")[0].tasks["a"].ending)

    assert redelivered(main) == "wait"


@pytest.mark.parametrize("settled", ["before the end is recorded", "after it"])
def test_a_message_that_comes_back_after_a_late_end_is_dropped(settled):
    store, main, body, header = runs_late()
    end_without_the_store(store, body, header)
    if settled == "after it":
        store.is_away = False
        eventually(lambda: store.read("1:00")[0].tasks["a"].ending)

    header.again = True  # the acknowledgement failed
    main.settle(header, "shop.rebuild", State.COMPLETED)
    store.is_away = False
    eventually(lambda: not main.retry_queue.waiting())

    assert redelivered(main) == "done"


def test_a_call_that_has_its_turn_by_a_settle_is_published(monkeypatch):
    """The store was away when the body ended, and the message comes back."""
    published: list[str] = []

    def publish_called(_: object, _key: str, called: tuple[Called, ...]) -> None:
        published.extend(one.task_id for one in called)

    monkeypatch.setattr(lock_client, "publish_called", publish_called)
    monkeypatch.setattr(lock_client, "state_of", lambda _: None)
    store, main, _, header = runs_late()
    queued = Claim("b", "shop.rebuild", "pwr", 1_000, on_conflict="queue", join="its message")
    assert store.acquire("1:00", queued).outcome == "queued"

    header.again = True
    main.settle(header, "shop.rebuild", State.COMPLETED)

    eventually(lambda: not main.retry_queue.waiting())
    assert published == ["b"]


@pytest.mark.parametrize("reply", ["of an act that ran", "of an act that did not run"])
def test_an_end_without_a_reply_loses_no_call_that_has_its_turn(monkeypatch, caplog, reply):
    published: list[str] = []

    def publish_called(_: object, _key: str, called: tuple[Called, ...]) -> None:
        published.extend(one.task_id for one in called)

    monkeypatch.setattr(lock_client, "publish_called", publish_called)
    monkeypatch.setattr(lock_client, "state_of", lambda _: None)
    store, _, body, header = runs_late()
    queued = Claim("b", "shop.rebuild", "pwr", 1_000, on_conflict="queue", join="its message")
    assert store.acquire("1:00", queued).outcome == "queued"
    finish, replies = store.finish, [reply]

    def without_reply(key: str, end: Finish) -> Finished:
        if not replies:
            return finish(key, end)
        if replies.pop() == "of an act that ran":
            finish(key, end)
        raise StoreUnavailable("no reply")

    monkeypatch.setattr(store, "finish", without_reply)
    with caplog.at_level(logging.WARNING):
        body.finish(header, "shop.rebuild", State.COMPLETED)
        eventually(lambda: not body.retry_queue.waiting())

    assert published == ["b"]
    assert "lost" not in caplog.text


def test_a_late_end_is_settled_where_nothing_else_does(monkeypatch):
    monkeypatch.setattr(lock_client, "SETTLE_ANYWAY_S", 0.5)
    store, _, body, header = runs_late()
    end_without_the_store(store, body, header)

    store.is_away = False

    eventually(lambda: not store.read("1:00")[0].tasks)


def test_a_late_end_that_is_recorded_closes_the_circuit(monkeypatch):
    """Else the releases of the next seconds would wait in the background, too."""
    monkeypatch.setattr(circuit_breaker, "OPEN_FOR_S", 3600)
    store, _, body, header = runs_late()
    for _ in range(3):  # the third does not reach the store
        end_without_the_store(store, body, header)

    store.is_away = False

    eventually(lambda: body.finish(header, "shop.rebuild", State.COMPLETED) is not None)


# -- a message that is revoked while another delivery holds the lock ------------------------------


def client_of(store: MemoryStore) -> WorkerLockClient:
    leases = Leases(queue_ms=60_000, run_ms=300, grace_ms=100, retention_ms=1, visibility_ms=1)
    store.acquire("1:00", Claim("a", "shop.rebuild", "pwr", grace_ms=60_000))
    return WorkerLockClient(SimpleNamespace(), store, store, leases)


def test_a_retry_that_is_revoked_before_its_sender_has_ended_leaves_no_key():
    """The body keeps the lock for a message that is gone: without this, for the queue lease."""
    store = MemoryStore()
    client = client_of(store)
    sender = LockHeader("a", "1:00", delivery="here/1/boot/1")
    sender.token = client.start(sender, "shop.rebuild", acks_late=False).token
    retry = LockHeader("a", "1:00", delivery="here/1/boot/2", sent_by=sender.delivery)

    client.finish(retry, "shop.rebuild", State.CANCELLED, backstop=True)
    client.retry(sender, "shop.rebuild", 0, copies=False)

    eventually(lambda: not store.read("1:00")[0].tasks)


def test_a_task_of_a_dead_worker_that_is_revoked_when_it_is_redelivered_leaves_no_key():
    store = MemoryStore()
    client = client_of(store)
    client.start(LockHeader("a", "1:00", delivery="here/1/boot/1"), "shop.rebuild", acks_late=True)
    redelivered = LockHeader("a", "1:00", delivery="there/2/boot/1")

    client.finish(redelivered, "shop.rebuild", State.CANCELLED, backstop=True)

    eventually(lambda: not store.read("1:00")[0].tasks)


def test_a_second_message_that_is_revoked_does_not_end_the_task_that_runs():
    store = MemoryStore()
    client = client_of(store)
    running = LockHeader("a", "1:00", delivery="here/1/boot/1")
    running.token = client.start(running, "shop.rebuild", acks_late=True).token
    lives = Held("1:00", "a", running.delivery, 60_000, 60_000)
    store.renew([lives])
    second = LockHeader("a", "1:00", delivery="there/2/boot/1")

    client.finish(second, "shop.rebuild", State.CANCELLED, backstop=True)
    eventually(lambda: not client.retry_queue.waiting())

    assert store.read("1:00")[0].tasks["a"].delivery == running.delivery
