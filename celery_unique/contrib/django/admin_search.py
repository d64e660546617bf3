"""The search of the admin's list of locks.

A store can be walked, and neither searched nor sorted. One request walks the store, keeps only
the locks up to the page that is shown, and stops after ``WALK_SECONDS``: the page then reports
that the list is incomplete. A whole key is read without a walk.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.locks import key_of_idempotency_key
from celery_unique.operations.select import Selection, holders_of, is_key
from celery_unique.publish.stale_holders.lock_view import LockView, StoreClock
from celery_unique.stores.record import Record

PER_PAGE = 100
#: More locks than these pages hold are found by narrowing the search.
MOST_PAGES = 100
#: For one request. A hundred thousand locks take about a quarter of it on two cores.
WALK_SECONDS = 10.0
#: Keys in one batch: a walk can be stopped only between two batches.
BATCH = 2000
#: Different names counted for the filter by task.
MOST_NAMES = 500

AGES = {
    "1m": ("More than a minute", timedelta(minutes=1)),
    "1h": ("More than an hour", timedelta(hours=1)),
    "1d": ("More than a day", timedelta(days=1)),
    "7d": ("More than a week", timedelta(days=7)),
}

#: Columns that sort the list. The oldest lock comes first in the order of creation.
ORDERS: dict[str, Callable[[LockView], Any]] = {
    "created": lambda lock: (lock.entry.created_at, lock.key),
    "task": lambda lock: (lock.entry.task_name, lock.entry.created_at, lock.key),
    "duplicates": lambda lock: (lock.entry.duplicates, lock.key),
    "expires": lambda lock: (lock.entry.lease, lock.key),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The query of a visitor. Empty: all locks, the oldest first."""

    text: str = ""
    task: str = ""
    state: str = ""
    age: str = ""
    order: str = "created"  # with a minus before it, descending
    page: int = 1

    def selection(self) -> Selection:
        older_than = AGES[self.age][1] if self.age else None
        return Selection(
            task=self.task or None,
            states=frozenset({self.state} if self.state else ()),
            older_than_ms=older_than // timedelta(milliseconds=1) if older_than else None,
        )


@dataclass(slots=True)
class Found:
    """One page of locks, and the totals of the walk."""

    locks: list[LockView] = field(default_factory=list)
    matched: int = 0
    seen: int = 0
    page: int = 1
    complete: bool = True  # False: the walk was stopped before the end of the store
    tasks: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)

    @property
    def pages(self) -> int:
        return min(MOST_PAGES, max(1, -(-self.matched // PER_PAGE)))


def find(app_state: AppState, wanted: Wanted, seconds: float = WALK_SECONDS) -> Found:
    """The wanted page of the locks. Raises StoreUnavailable."""
    found = Found()
    matching = _matching(app_state, wanted, found, monotonic() + seconds)
    keep = wanted.page * PER_PAGE
    choose = heapq.nlargest if wanted.order.startswith("-") else heapq.nsmallest
    locks = choose(keep, matching, key=ORDERS[wanted.order.removeprefix("-")])
    found.page = min(wanted.page, found.pages)
    found.locks = locks[(found.page - 1) * PER_PAGE : found.page * PER_PAGE]
    return found


def _matching(
    app_state: AppState, wanted: Wanted, found: Found, stop_at: float
) -> Iterator[LockView]:
    """Every matching lock, one for each key; counts in ``found``."""
    selection, text = wanted.selection(), wanted.text.lower()
    keys = _keys_of_idempotency_key(app_state, wanted.text)
    for key, record, now in _records(app_state, wanted.text, stop_at):
        for lock in holders_of(key, record, now)[:1]:
            name = lock.entry.task_name
            found.seen += 1
            found.states[lock.state] += 1
            if name in found.tasks or len(found.tasks) < MOST_NAMES:
                found.tasks[name] += 1
            searched = (name, lock.task_id, key, lock.worker)
            if selection.matches(lock) and (
                key in keys or any(text in part.lower() for part in searched)
            ):
                found.matched += 1
                yield lock
        if monotonic() > stop_at:
            break
    found.complete = monotonic() <= stop_at


def _records(app_state: AppState, text: str, stop_at: float) -> Iterable[tuple[str, Record, int]]:
    if is_key(text):
        return [(text, *app_state.store.read(text))]
    now = StoreClock(app_state).now()
    return ((key, record, now) for key, record in app_state.store.walk(BATCH, stop_at))


def _keys_of_idempotency_key(app_state: AppState, text: str) -> set[str]:
    """The keys of the text as an idempotency key: one for each task."""
    keys = set()
    for name in app_state.app.tasks if text else ():
        try:
            keys.add(key_of_idempotency_key(app_state, name, text))
        except CeleryUniqueError:  # too long, or a task whose keys need the headers of a call
            continue
    return keys
