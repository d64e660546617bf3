"""Selects locks by task, state, age, id and worker, or by one key."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_unique.config.app_state import AppState, state_of
from celery_unique.config.leases import moment_of
from celery_unique.exceptions import InvalidPolicy, UnreadableRecord, one_of, shown, suggestion
from celery_unique.header import DeliveryName
from celery_unique.policy.states import LIVE, STATES, TERMINAL
from celery_unique.stores.diagnosis import NO_CALLS_KEY
from celery_unique.stores.record import LETTER_OF, Record, State, TaskEntry

#: Names for several states.
STATE_GROUPS = {
    "waiting": ("pending", "scheduled", "available", "retryable"),
    "live": LIVE,
    "ended": TERMINAL,
}
#: An operator's release is not a state of the Open Job Spec, nor is a record that cannot be read:
#: it is listed so that it can be released, which deletes it.
RELEASED = "released"
UNREADABLE = "unreadable"
STATE_NAMES = (*STATES, *STATE_GROUPS, RELEASED, UNREADABLE)

_WHOLE_KEY = re.compile(r"\d+:[0-9a-f]{64}")
_PART_OF_KEY = re.compile(r"(?:\d+:)?[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class LockView:
    """One task that is recorded under a key, as read at ``now`` of the store's clock."""

    key: str
    task_id: str
    entry: TaskEntry
    now: int
    unreadable: str = ""  # why nothing but the key is known

    @property
    def state(self) -> str:
        if self.unreadable:
            return UNREADABLE
        return RELEASED if self.entry.released else str(self.entry.shown_state(self.now))

    @property
    def age_ms(self) -> int:
        return max(0, self.now - self.entry.created_at)

    @property
    def worker(self) -> str:
        """The worker that runs it; empty where none does."""
        return DeliveryName.parse(self.entry.delivery).worker

    def as_document(self) -> dict[str, Any]:
        """The record in plain values."""
        entry = self.entry
        return {
            "key": self.key,
            "task": entry.task_name,
            "task_id": self.task_id,
            "state": self.state,
            "created_at": _moment(entry.created_at),
            "age_s": self.age_ms / 1000,
            "lease_ends_at": _moment(entry.lease),
            "window_ends_at": _moment(entry.window_ends),
            "eta": _moment(entry.eta),
            "duplicates": entry.duplicates,
            "last_duplicate_at": _moment(entry.last_duplicate_at),
            "worker": self.worker or None,
            "delivery": entry.delivery or None,
            "delivery_lease_ends_at": _moment(entry.delivery_lease),
            "token": entry.token or None,
            "replaced_by": entry.by or None,
            "comes_after": entry.after or None,
            "ending": entry.ending,
            "may_exist_twice": entry.copies,
            "by_idempotency_key": bool(entry.arguments),
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions, all of which a lock must meet. The empty selection matches every lock."""

    task: str | None = None  # a name, or a pattern with * ? [ ]
    states: frozenset[str] = frozenset()
    older_than_ms: int | None = None
    newer_than_ms: int | None = None
    task_id: str | None = None
    worker: str | None = None  # a name, or a pattern
    key: str | None = None

    def is_empty(self) -> bool:
        return self == Selection()

    def matches(self, lock: LockView) -> bool:
        if self.task_id is not None and lock.task_id != self.task_id:
            return False
        if self.task is not None and not _is_like(lock.entry.task_name, self.task):
            return False
        if self.worker is not None and not _is_like(lock.worker, self.worker):
            return False
        if self.states and lock.state not in self.states:
            return False
        if self.older_than_ms is not None and lock.age_ms < self.older_than_ms:
            return False
        return self.newer_than_ms is None or lock.age_ms <= self.newer_than_ms


def _is_like(text: str, pattern: str) -> bool:
    return text == pattern or fnmatch.fnmatchcase(text, pattern)


def states_named(names: tuple[str, ...]) -> frozenset[str]:
    """The states of these names, each of a state or of a group."""
    found: set[str] = set()
    for name in names:
        if name not in STATE_NAMES:
            raise InvalidPolicy(
                f"state: {shown(name)} is not known.{suggestion(name, STATE_NAMES)} "
                f"Use {one_of(STATE_NAMES)}",
                field="states",
            )
        found.update(STATE_GROUPS.get(name, (name,)))
    return frozenset(found)


def installed_state(app: Any) -> AppState:
    """The state of an app, with all its tasks loaded, as in a worker."""
    app = getattr(app, "_get_current_object", lambda: app)()
    app.loader.import_default_modules()
    app.finalize(auto=True)
    return state_of(app)


def select(app_state: AppState, selection: Selection) -> Iterator[LockView]:
    """The locks that match, in the order of the store's cursor."""
    for lock in _all_locks(app_state, selection.key):
        if selection.matches(lock):
            yield lock


def _all_locks(app_state: AppState, key: str | None) -> Iterator[LockView]:
    if key is not None:
        record, now = _read(app_state, key)
        yield from locks_of(key, record, now)
        return
    clock = StoreClock(app_state)
    for found, record in app_state.store.walk():
        yield from locks_of(found, record, clock.now())


def _read(app_state: AppState, key: str) -> tuple[Record, int]:
    """As a walk of the store returns it."""
    try:
        return app_state.store.read(key)
    except UnreadableRecord as error:
        return Record(unreadable=str(error)), StoreClock(app_state).now()


def locks_of(key: str, record: Record, now: int) -> Iterator[LockView]:
    """The tasks of one record, the oldest first; one without an id where it cannot be read."""
    if record.unreadable:
        yield LockView(
            key, "", TaskEntry(LETTER_OF[State.CANCELLED], now, now), now, record.unreadable
        )
    tasks = sorted(record.tasks.items(), key=lambda item: item[1].created_at)
    for task_id, entry in tasks:
        yield LockView(key, task_id, entry, now)


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


def is_key(text: str) -> bool:
    return _WHOLE_KEY.fullmatch(text) is not None


def find(app_state: AppState, text: str) -> Iterator[tuple[str, Record, int]]:
    """Every key that the text may name: a whole or shortened key, or a task's id."""
    if is_key(text):
        record, now = _read(app_state, text)
        if record:
            yield text, record, now
        return
    clock = StoreClock(app_state)
    part = text if _PART_OF_KEY.fullmatch(text) else None
    for key, record in app_state.store.walk():
        if record.more_until and (mark := app_state.store.mark(key, text)):
            record.marks[text] = mark  # kept beside the record
        if text in record.tasks or text in record.marks or (part and _begins_with(key, part)):
            yield key, record, clock.now()


def _begins_with(key: str, part: str) -> bool:
    return key.startswith(part) or key.partition(":")[2].startswith(part)


def holders_of(key: str, record: Record, now: int) -> list[LockView]:
    """The tasks that hold the key: an active one first, then the newest."""
    held = [lock for lock in locks_of(key, record, now) if lock.task_id and not lock.entry.released]
    return sorted(held, key=lambda lock: (lock.state == "active", -lock.age_ms), reverse=True)


def brief(milliseconds: float, units: int = 2) -> str:
    """The largest units of a duration, never negative: ``3d 4h``, ``2h 5m``, ``45s``."""
    seconds = max(0, int(milliseconds // 1000))
    parts: list[str] = []
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{name}")
    return " ".join(part for part in parts[:units] if not part.startswith("0")) or "0s"


def _moment(milliseconds: int) -> datetime | None:
    return moment_of(milliseconds) if milliseconds else None
