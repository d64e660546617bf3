"""Counts the locks of a store in one walk, in bounded memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.publish.coordinator import LONG_WAIT_MS
from celery_unique.publish.stale_holders.lock_view import LockView, StoreClock, locks_of

#: Task names come from messages; names beyond these are counted together.
MOST_NAMES = 1000
OTHERS = "(others)"


@dataclass(slots=True)
class TaskCount:
    locks: int = 0
    duplicates: int = 0
    oldest_ms: int = 0
    #: The longest time that one has waited in its queue, and how many have for an hour.
    waited_ms: int = 0
    stale: int = 0
    states: Counter[str] = field(default_factory=Counter)

    def add(self, lock: LockView) -> None:
        self.locks += 1
        self.duplicates += lock.entry.duplicates
        self.oldest_ms = max(self.oldest_ms, lock.age_ms)
        self.waited_ms = max(self.waited_ms, lock.waited_ms)
        self.stale += lock.waited_ms > LONG_WAIT_MS
        self.states[lock.state] += 1

    def as_document(self) -> dict[str, Any]:
        return {
            "locks": self.locks,
            "duplicates": self.duplicates,
            "oldest_s": self.oldest_ms / 1000,
            "states": dict(self.states),
        }


@dataclass(slots=True)
class Counts:
    keys: int = 0
    marks: int = 0
    parked: int = 0
    #: Whether all keys were counted.
    complete: bool = True
    total: TaskCount = field(default_factory=TaskCount)
    tasks: dict[str, TaskCount] = field(default_factory=dict)

    def add(self, lock: LockView) -> None:
        name = lock.entry.task_name
        if name not in self.tasks and len(self.tasks) >= MOST_NAMES:
            name = OTHERS
        self.total.add(lock)
        self.tasks.setdefault(name, TaskCount()).add(lock)

    def as_document(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "marks": self.marks,
            "parked": self.parked,
            **self.total.as_document(),
            "tasks": {name: count.as_document() for name, count in self.tasks.items()},
        }


def count_all(
    app_state: AppState, most_keys: float = math.inf, within_s: float = math.inf
) -> Counts:
    """All locks, keys and marks of the store, or those that it yields first."""
    counts = Counts()
    clock = StoreClock(app_state)
    stop_at = time.monotonic() + within_s
    for key, record in app_state.store.walk(stop_at=stop_at):
        if counts.keys >= most_keys:
            counts.complete = False
            return counts
        counts.keys += 1
        counts.marks += len(record.marks) + record.more_marks
        counts.parked += record.parked
        for lock in locks_of(key, record, clock.now()):
            counts.add(lock)
    counts.complete = time.monotonic() <= stop_at
    return counts


def count_locks(locks: Iterable[LockView]) -> Counts:
    """Of these locks, those of one key together."""
    counts = Counts()
    key = ""
    for lock in locks:
        counts.add(lock)
        if lock.key != key:
            counts.parked += lock.parked
        key = lock.key
    return counts
