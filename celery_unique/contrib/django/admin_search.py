"""Finding locks for the admin's list, however many there are.

A store can be walked, not searched or sorted. So one request walks all of it, keeps no
more than the locks up to the page that is shown, and stops when its time is over: the
page then says that it has not seen all. A whole key needs no walk.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.locks import Lock, key_of_idempotency_key, lock_of
from celery_unique.operations.select import StoreClock, is_key
from celery_unique.stores.record import Record

PER_PAGE = 100
#: What can be paged through; further ones are found by narrowing the search.
MOST_PAGES = 100
#: For one request. A hundred thousand locks take about a quarter of it on two cores.
WALK_SECONDS = 10.0
#: Keys asked for at once: a walk can only be stopped between two batches.
BATCH = 2000
#: Different names counted for the filter by task.
MOST_NAMES = 500

AGES = {
    "1m": ("More than a minute", timedelta(minutes=1)),
    "1h": ("More than an hour", timedelta(hours=1)),
    "1d": ("More than a day", timedelta(days=1)),
    "7d": ("More than a week", timedelta(days=7)),
}

#: What the list can be sorted by. Sorting by age from old to young is by creation.
ORDERS: dict[str, Callable[[Lock], Any]] = {
    "created": lambda lock: (lock.created_at, lock.key),
    "task": lambda lock: (lock.task_name, lock.created_at, lock.key),
    "duplicates": lambda lock: (lock.duplicates, lock.key),
    "expires": lambda lock: (lock.expires_at, lock.key),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a visitor asks for. Empty: everything, oldest first."""

    text: str = ""
    task: str = ""
    state: str = ""
    age: str = ""
    order: str = "created"  # a minus before it: the other way round
    page: int = 1


@dataclass(slots=True)
class Found:
    """One page, and what was seen on the way to it."""

    locks: list[Lock] = field(default_factory=list)
    matched: int = 0
    seen: int = 0
    page: int = 1
    complete: bool = True  # False: time was over before the whole store was seen
    now: datetime = field(default_factory=lambda: datetime.now(UTC))  # the store's clock
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
    if wanted.order.startswith("-"):
        locks = heapq.nlargest(keep, matching, key=ORDERS[wanted.order[1:]])
    else:
        locks = heapq.nsmallest(keep, matching, key=ORDERS[wanted.order])
    found.page = min(wanted.page, found.pages)
    found.locks = locks[(found.page - 1) * PER_PAGE : found.page * PER_PAGE]
    return found


def _matching(app_state: AppState, wanted: Wanted, found: Found, stop_at: float) -> Iterator[Lock]:
    """Every matching lock; ``found`` is counted on the way."""
    records = _records(app_state, wanted.text, found, stop_at)
    matches = _matcher(app_state, wanted, found.now)
    for lock in _walk(records, found, stop_at):
        found.seen += 1
        found.states[lock.state] += 1
        if lock.task_name in found.tasks or len(found.tasks) < MOST_NAMES:
            found.tasks[lock.task_name] += 1
        if matches(lock):
            found.matched += 1
            yield lock


def _records(
    app_state: AppState, text: str, found: Found, stop_at: float
) -> Iterable[tuple[str, Record]]:
    """What is looked at; ``found`` gets the store's clock."""
    if is_key(text):
        record, now_ms = app_state.store.read(text)
        records: Iterable[tuple[str, Record]] = [(text, record)]
    else:
        now_ms = StoreClock(app_state).now()
        records = app_state.store.walk(BATCH, stop_at)
    found.now = moment_of(now_ms)
    return records


def _walk(records: Iterable[tuple[str, Record]], found: Found, stop_at: float) -> Iterator[Lock]:
    now_ms = round(found.now.timestamp() * 1000)
    for key, record in records:
        lock = lock_of(key, record, now_ms)
        if lock is not None:
            yield lock
        if monotonic() > stop_at:
            break
    found.complete = monotonic() <= stop_at


def _matcher(app_state: AppState, wanted: Wanted, now: datetime) -> Callable[[Lock], bool]:
    text = wanted.text.lower()
    behind = _keys_behind(app_state, wanted.text)
    youngest = now - AGES[wanted.age][1] if wanted.age else None

    def matches(lock: Lock) -> bool:
        return (
            (not wanted.task or lock.task_name == wanted.task)
            and (not wanted.state or lock.state == wanted.state)
            and (youngest is None or lock.created_at <= youngest)
            and (
                not text
                or lock.key in behind
                or any(text in part.lower() for part in _searched(lock))
            )
        )

    return matches


def _searched(lock: Lock) -> tuple[str, ...]:
    return (lock.task_name, lock.task_id, lock.key, lock.worker or "")


def _keys_behind(app_state: AppState, text: str) -> set[str]:
    """The keys that the text has as somebody's idempotency key: one for each task."""
    keys = set()
    for name in app_state.app.tasks if text else ():
        try:
            keys.add(key_of_idempotency_key(app_state, name, text))
        except CeleryUniqueError:  # too long, or a task whose keys need a call's headers
            continue
    return keys
