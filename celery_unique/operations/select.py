"""Selects locks by task, state, age, id and worker, or by one key."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import InvalidPolicy, UnreadableRecord, one_of, shown, suggestion
from celery_unique.keys.digest import guard_key
from celery_unique.policy.states import LIVE, STATES, TERMINAL
from celery_unique.publish.stale_holders.lock_view import (
    PARKED,
    RELEASED,
    UNREADABLE,
    LockView,
    StoreClock,
    lane_of,
    locks_of,
    parked_ids,
)
from celery_unique.stores.record import Record

#: Names for several states, and other names for one.
STATE_GROUPS = {
    "waiting": ("pending", "scheduled", "available", "retryable"),
    "live": LIVE,
    "ended": TERMINAL,
    # Other words for one state.
    "queued": ("available",),
    "running": ("active",),
    "retrying": ("retryable",),
    "succeeded": ("completed",),
    "failed": ("discarded",),
    "revoked": ("cancelled",),
}
STATE_NAMES = (*STATES, *STATE_GROUPS, PARKED, RELEASED, UNREADABLE)

_WHOLE_KEY = re.compile(r"\d+:[0-9a-f]{64}")
_PART_OF_KEY = re.compile(r"(?:\d+:)?[0-9a-f]{6,64}")


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
    for key, record, now in _all_records(app_state, selection.key):
        yield from filter(selection.matches, locks_of(key, record, now))


def select_with_lanes(app_state: AppState, selection: Selection) -> Iterator[LockView]:
    """The same; also lanes that no task holds, and by the id of a parked call what it waits for,
    with its position: to see, and not to release."""
    for key, record, now in _all_records(app_state, selection.key):
        found = [lock for lock in locks_of(key, record, now) if selection.matches(lock)]
        yield from found
        if not found or selection.task_id is None:
            yield from _lanes(app_state, selection, key, record, now)


def _lanes(
    app_state: AppState, selection: Selection, key: str, record: Record, now: int
) -> Iterator[LockView]:
    lane = lane_of(key, record, now)
    waited_for = [lane] if lane is not None else []
    if selection.task_id is not None:
        position = position_of(app_state, key, record, selection.task_id)
        selection = replace(selection, task_id=None)
        locks = waited_for or holders_of(key, record, now)
        waited_for = [replace(lock, position=position) for lock in locks if position]
    yield from filter(selection.matches, waited_for)


def position_of(app_state: AppState, key: str, record: Record, task_id: str | None) -> int:
    """The place of a parked call in the lane of the key; 0: it is not parked there."""
    parked = parked_ids(app_state, key, record) if task_id else []
    return parked.index(task_id) + 1 if task_id in parked else 0


def _all_records(app_state: AppState, key: str | None) -> Iterator[tuple[str, Record, int]]:
    if key is not None:
        yield key, *_read(app_state, key)
        return
    clock = StoreClock(app_state)
    for found, record in app_state.store.walk():
        yield found, record, clock.now()


def _read(app_state: AppState, key: str) -> tuple[Record, int]:
    """As a walk of the store returns it."""
    try:
        return app_state.store.read(key)
    except UnreadableRecord as error:
        return Record(unreadable=str(error)), StoreClock(app_state).now()


def is_key(text: str) -> bool:
    return _WHOLE_KEY.fullmatch(text) is not None


def find(app_state: AppState, text: str) -> Iterator[tuple[str, Record, int]]:
    """Every key that the text may name: a whole or shortened key, or a task's id."""
    if is_key(text):
        record, now = _read(app_state, text)
        if record:
            yield text, record, now
        return
    key = guard_key(text)
    record, now = _read(app_state, key)
    if record:  # the id of a guarded task needs no walk
        yield key, record, now
        return
    clock = StoreClock(app_state)
    part = text if _PART_OF_KEY.fullmatch(text) else None
    for key, record in app_state.store.walk():
        if record.more_until and (mark := app_state.store.mark(key, text)):
            record.marks[text] = mark  # kept beside the record
        known = text in record.tasks or text in record.marks or (part and _begins_with(key, part))
        if known or text in parked_ids(app_state, key, record):
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
