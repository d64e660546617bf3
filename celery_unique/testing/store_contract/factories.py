"""Acts on a store, with usual values for the arguments that do not matter.

Every duration is a multiple of a minute, so that the few milliseconds between
two acts can never be mistaken for one.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from celery_unique.stores.base import (
    Acquired,
    Claim,
    Finish,
    Finished,
    Held,
    LockStore,
    Start,
    Started,
)
from celery_unique.stores.record import Record, State, TaskEntry, letters
from celery_unique.stores.record_followers import Follower

MINUTE = 60_000
GRACE = 2 * MINUTE
RUN_LEASE = 5 * MINUTE
QUEUE_LEASE = 60 * MINUTE
RETENTION = 240 * MINUTE

UNTIL_DONE = letters(["pending", "scheduled", "available", "active", "retryable"])
EVERY_STATE = letters(State)
SUCCESS = letters(["completed"])

_numbers = itertools.count()


def fresh_key() -> str:
    """A key as the library makes them, not used before in this process."""
    return "1:" + hashlib.sha256(str(next(_numbers)).encode()).hexdigest()


def about(time_ms: int) -> Any:
    """Equal to a time up to half a minute away: real time passes between two acts."""
    return pytest.approx(time_ms, abs=MINUTE // 2)


def advance(store: LockStore, by_ms: int) -> None:
    store.clock_offset_ms += by_ms


def now_of(store: LockStore) -> int:
    return store.read("1:no such key")[1]


def claim(task_id: str, **fields: Any) -> Claim:
    defaults: dict[str, Any] = {"states": UNTIL_DONE, "grace_ms": GRACE}
    defaults["task_name"] = "shop.rebuild"
    if "merge" in fields:
        defaults |= {"on_conflict": "merge", "merge_max_bytes": 1_000_000}
    return Claim(task_id, **{**defaults, **fields})


def start(task_id: str, delivery: str = "d1", **fields: Any) -> Start:
    defaults: dict[str, Any] = {"lease_ms": QUEUE_LEASE, "run_lease_ms": RUN_LEASE}
    return Start(task_id, delivery, "shop.rebuild", **{**defaults, **fields})


def running(key: str, task_id: str, delivery: str = "d1", **fields: Any) -> Held:
    """A line of a renewal for a body that runs."""
    defaults: dict[str, Any] = {"lease_ms": QUEUE_LEASE, "run_lease_ms": RUN_LEASE}
    return Held(key, task_id, delivery, **{**defaults, **fields})


def held(
    key: str, task_id: str, lease_ms: int = QUEUE_LEASE, waits_as: str = "", **fields: Any
) -> Held:
    """A line of a renewal for a message that waits in a worker."""
    return Held(key, task_id, "", lease_ms, waits_as=waits_as, **fields)


def finish(task_id: str, delivery: str = "d1", **fields: Any) -> Finish:
    defaults: dict[str, Any] = {
        "state": State.COMPLETED,
        "retention_ms": RETENTION,
        "mark_ms": QUEUE_LEASE,
    }
    return Finish(task_id, delivery, **{**defaults, **fields})


# -- a task brought to a state ------------------------------------------------


def publish(store: LockStore, key: str, task_id: str, **fields: Any) -> None:
    """The whole of a call that is admitted: acquire, and confirm after the publish."""
    assert store.acquire(key, claim(task_id, **fields)).outcome == "created"
    confirm(store, key, task_id)


def confirm(store: LockStore, key: str, task_id: str, lease_ms: int = QUEUE_LEASE) -> None:
    store.confirm(key, task_id, lease_ms)
    store.flush()


def run(store: LockStore, key: str, task_id: str, delivery: str = "d1", **fields: Any) -> Started:
    """Publish and start."""
    publish(store, key, task_id, **fields)
    started = store.start(key, start(task_id, delivery))
    assert started.verdict == "run"
    return started


def retry(
    store: LockStore,
    key: str,
    task_id: str,
    delivery: str = "d1",
    *,
    lease_ms: int = QUEUE_LEASE,
    copies: bool = False,
) -> None:
    store.retry(key, task_id, delivery, lease_ms, copies)
    store.flush()


def settle(
    store: LockStore,
    key: str,
    task_id: str,
    delivery: str = "d1",
    *,
    mark_done: bool = False,
    **fields: Any,
) -> None:
    store.settle(key, finish(task_id, delivery, **fields), mark_done)
    store.flush()


def bring_to(store: LockStore, key: str, task_id: str, state: State) -> None:
    """Publish a task that keeps every final state, and bring it to ``state``."""
    keep = letters(["completed", "discarded", "cancelled"])
    if state is State.PENDING:
        store.acquire(key, claim(task_id, keep=keep))
    elif state is State.SCHEDULED:
        publish(store, key, task_id, keep=keep, delay_ms=10 * MINUTE)
    elif state is State.AVAILABLE:
        publish(store, key, task_id, keep=keep)
    else:
        run(store, key, task_id, keep=keep)
    if state is State.RETRYABLE:
        retry(store, key, task_id)
    elif state in (State.COMPLETED, State.DISCARDED, State.CANCELLED):
        store.finish(key, finish(task_id, state=state))


# -- what is recorded ---------------------------------------------------------


def record_of(store: LockStore, key: str) -> Record:
    return store.read(key)[0]


def task_of(store: LockStore, key: str, task_id: str) -> TaskEntry:
    return record_of(store, key).tasks[task_id]


# -- one key ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the store under test, and the acts on it with their usual arguments."""

    store: LockStore
    text: str

    def advance(self, by_ms: int) -> None:
        advance(self.store, by_ms)

    def now(self) -> int:
        return now_of(self.store)

    def record(self) -> Record:
        return record_of(self.store, self.text)

    def task(self, task_id: str) -> TaskEntry:
        return self.record().tasks[task_id]

    def bring_to(self, task_id: str, state: State) -> None:
        bring_to(self.store, self.text, task_id, state)

    # -- acts of the caller ---------------------------------------------------

    def acquire(self, task_id: str, **fields: Any) -> Acquired:
        return self.store.acquire(self.text, claim(task_id, **fields))

    def publish(self, task_id: str, **fields: Any) -> None:
        publish(self.store, self.text, task_id, **fields)

    def confirm(self, task_id: str, lease_ms: int = QUEUE_LEASE) -> None:
        confirm(self.store, self.text, task_id, lease_ms)

    def give_back(self, task_id: str, mark_ms: int = QUEUE_LEASE) -> bool:
        return self.store.give_back(self.text, task_id, mark_ms)

    def help(self, task_id: str, claim_ms: int = 0) -> str:
        return self.store.help(self.text, task_id, claim_ms)

    def cancel(self, task_id: str, mark_ms: int = QUEUE_LEASE) -> str:
        return self.store.cancel(self.text, task_id, mark_ms)

    def unmerge(self, call_id: str) -> bool:
        return self.store.unmerge(self.text, call_id)

    def release(self, task_id: str | None = None, lease: int = 0) -> int:
        return self.store.release(self.text, task_id, lease)

    # -- acts of the worker ---------------------------------------------------

    def run(self, task_id: str, delivery: str = "d1", **fields: Any) -> Started:
        return run(self.store, self.text, task_id, delivery, **fields)

    def start(self, task_id: str, delivery: str = "d1", **fields: Any) -> Started:
        return self.store.start(self.text, start(task_id, delivery, **fields))

    def running(self, task_id: str, delivery: str = "d1", **fields: Any) -> Held:
        return running(self.text, task_id, delivery, **fields)

    def held(self, task_id: str, lease_ms: int = QUEUE_LEASE, **fields: Any) -> Held:
        return held(self.text, task_id, lease_ms, **fields)

    def retry(self, task_id: str, delivery: str = "d1", **fields: Any) -> None:
        retry(self.store, self.text, task_id, delivery, **fields)

    def finish(self, task_id: str, delivery: str = "d1", **fields: Any) -> Finished:
        return self.store.finish(self.text, finish(task_id, delivery, **fields))

    def settle(self, task_id: str, delivery: str = "d1", **fields: Any) -> None:
        settle(self.store, self.text, task_id, delivery, **fields)

    def forget(self, task_id: str) -> None:
        self.store.forget(self.text, task_id)
        self.store.flush()

    # -- followers ------------------------------------------------------------

    def followers(self, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        return self.store.followers(self.text, holder_id)

    def complete_follower(self, follower_id: str) -> None:
        self.store.complete_follower(self.text, follower_id)
