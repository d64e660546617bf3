"""One task that is recorded under a key, as an operator sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of
from celery_unique.header import DeliveryName
from celery_unique.keys.digest import guarded_by
from celery_unique.stores.diagnosis import NO_CALLS_KEY
from celery_unique.stores.record import LETTER_OF, Record, State, TaskEntry

#: An operator's release is not a state of the Open Job Spec, nor is a record that cannot be read:
#: it is listed so that it can be released, which deletes it.
RELEASED = "released"
UNREADABLE = "unreadable"
#: No task holds the key, and calls are parked under it: a worker is to publish the next one.
PARKED = "parked"


@dataclass(frozen=True, slots=True)
class LockView:
    """One task that is recorded under a key, as read at ``now`` of the store's clock."""

    key: str
    task_id: str
    entry: TaskEntry
    now: int
    unreadable: str = ""  # why nothing but the key is known
    parked: int = 0  # calls that wait for their turn under the key
    position: int = 0  # of the parked call that was searched for; 0: of none

    @property
    def state(self) -> str:
        if self.unreadable:
            return UNREADABLE
        if not self.task_id:
            return PARKED
        return RELEASED if self.entry.released else str(self.entry.shown_state(self.now))

    @property
    def age_ms(self) -> int:
        return max(0, self.now - self.entry.created_at)

    @property
    def waited_ms(self) -> int:
        """How long it has waited in the queue since it was due; 0 where it does not."""
        entry = self.entry
        if self.state != State.AVAILABLE:
            return 0
        return max(0, self.now - max(entry.created_at, entry.eta))

    @property
    def worker(self) -> str:
        """The worker that runs it; empty where none does."""
        return DeliveryName.parse(self.entry.delivery).worker

    @property
    def guards(self) -> bool:
        """Whether it is the lock of a task without a key, which guards its deliveries."""
        return guarded_by(self.key, self.task_id) is not None

    def as_document(self) -> dict[str, Any]:
        """The record in plain values."""
        entry = self.entry
        return {
            "key": self.key,
            "task": entry.task_name,
            "task_id": self.task_id,
            "label": entry.label or None,
            "state": self.state,
            "created_at": _moment(entry.created_at),
            "age_s": self.age_ms / 1000,
            "lease_ends_at": _moment(entry.lease),
            "window_ends_at": _moment(entry.window_ends),
            "eta": _moment(entry.eta),
            "duplicates": entry.duplicates,
            "last_duplicate_at": _moment(entry.last_duplicate_at),
            "parked": self.parked,
            "position": self.position or None,
            "worker": self.worker or None,
            "delivery": entry.delivery or None,
            "delivery_lease_ends_at": _moment(entry.delivery_lease),
            "token": entry.token or None,
            "replaced_by": entry.by or None,
            "comes_after": entry.after or None,
            "ending": entry.ending,
            "may_exist_twice": entry.copies,
            "by_idempotency_key": bool(entry.arguments),
            "merges": entry.merges,
            "guard": self.guards,
        }


def locks_of(key: str, record: Record, now: int) -> Iterator[LockView]:
    """The tasks of one record, the oldest first; one without an id where it cannot be read."""
    if record.unreadable:
        yield LockView(
            key, "", TaskEntry(LETTER_OF[State.CANCELLED], now, now), now, record.unreadable
        )
    tasks = sorted(record.tasks.items(), key=lambda item: item[1].created_at)
    for task_id, entry in tasks:
        yield LockView(key, task_id, entry, now, parked=record.parked)


def lane_of(key: str, record: Record, now: int) -> LockView | None:
    """The lane of a key that no task holds, since it was released or its lease has lapsed: without
    an id, as old as a worker is due to publish the next call. None where a task holds the key or
    no call waits."""
    waiting = record.parked + len(record.called_before)
    if not waiting or record.following is None:
        return None
    if any(not task.released for task in record.tasks.values()):
        return None
    name = next((task.task_name for task in record.tasks.values()), "")
    following = record.following
    entry = TaskEntry("", following.due_at, following.kept_until, name)
    return LockView(key, "", entry, now, parked=waiting)


def parked_ids(app_state: AppState, key: str, record: Record) -> list[str]:
    """The calls that wait for their turn under the key, the next one first."""
    parked = app_state.store.parked(key) if record.parked else []
    return record.called_before + parked


class StoreClock:
    """The store's clock, read once for a whole walk."""

    def __init__(self, app_state: AppState) -> None:
        began = time.monotonic()
        sent_at = time.time()
        _, self._read = app_state.store.read(NO_CALLS_KEY)
        self._at = time.monotonic()
        self.round_trip_ms = (self._at - began) * 1000
        #: How far this machine's clock is ahead of the store's, and at most how wrong that is.
        self.skew_ms = (sent_at + self.round_trip_ms / 2000) * 1000 - self._read

    def now(self) -> int:
        return self._read + round((time.monotonic() - self._at) * 1000)


def _moment(milliseconds: int) -> datetime | None:
    return moment_of(milliseconds) if milliseconds else None
