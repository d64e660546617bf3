"""The search behind the pages of locks: Django's admin, and ``celery unique web``.

A store can be walked, and neither searched nor sorted. One request walks the store, keeps only
what its page needs, and stops after ``WALK_SECONDS``: the page then reports that the list is
incomplete. A whole key is read without a walk.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from time import monotonic
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.locks import key_of_idempotency_key
from celery_unique.policy.states import STATES, TERMINAL
from celery_unique.publish.stale_holders.lock_view import LockView, StoreClock, lane_of
from celery_unique.stores.record import Record, TaskEntry

from .select import Selection, holders_of, is_key, position_of

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


#: Finished tasks whose policy keeps the key taken are listed apart: there can be many of them.
ENDED = "ended"
ANY = "all"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The query of a visitor. Empty: the locks of tasks that have not finished, oldest first."""

    text: str = ""
    task: str = ""
    state: str = ""  # a state, ENDED or ANY
    age: str = ""
    order: str = "created"  # with a minus before it, descending
    page: int = 1

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Wanted:
        """Read a query string; ignores values that are not valid."""
        state, age, order = query.get("state", ""), query.get("age", ""), query.get("o", "")
        return cls(
            text=query.get("q", "").replace("\x00", "").strip()[:500],
            task=query.get("task", "")[:500],
            state=state if state in (*STATES, ENDED, ANY) else "",
            age=age if age in AGES else "",
            order=order if order.removeprefix("-") in ORDERS else "created",
            page=_page(query.get("p", "1")),
        )

    def selection(self) -> Selection:
        """All conditions but whether the task has finished."""
        older_than = AGES[self.age][1] if self.age else None
        return Selection(
            task=self.task or None,
            older_than_ms=older_than // timedelta(milliseconds=1) if older_than else None,
        )

    def shows(self, state: str) -> bool:
        if not self.state:
            return state not in TERMINAL
        if self.state == ENDED:
            return state in TERMINAL
        return self.state in (ANY, state)

    @property
    def is_narrowed(self) -> bool:
        return bool(self.text or self.task or self.state or self.age)


def _page(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1
    return min(max(number, 1), MOST_PAGES)


@dataclass(slots=True)
class Found:
    """One page of locks, and the totals of the walk."""

    locks: list[LockView] = field(default_factory=list)
    matched: int = 0
    apart: int = 0  # would match, but their tasks have finished, and were not asked for
    seen: int = 0
    page: int = 1
    more: bool = False  # beyond a cursor's page
    complete: bool = True  # False: the walk was stopped before the end of the store
    tasks: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)

    @property
    def pages(self) -> int:
        return min(MOST_PAGES, max(1, -(-self.matched // PER_PAGE)))


def find_page(app_state: AppState, wanted: Wanted, seconds: float = WALK_SECONDS) -> Found:
    """The wanted page, by its number; keeps the locks up to it. Raises StoreUnavailable."""
    found = Found()
    matching = _matching(app_state, wanted, found, monotonic() + seconds)
    keep = wanted.page * PER_PAGE
    choose = heapq.nlargest if wanted.order.startswith("-") else heapq.nsmallest
    locks = choose(keep, matching, key=ORDERS[wanted.order.removeprefix("-")])
    found.page = min(wanted.page, found.pages)
    found.locks = locks[(found.page - 1) * PER_PAGE : found.page * PER_PAGE]
    return found


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order of a list: a page begins after it or, going back, ends before it."""

    place: tuple[Any, ...]
    back: bool = False

    def encode(self) -> str:
        return json.dumps([self.back, *self.place], separators=(",", ":"))

    @classmethod
    def of(cls, lock: LockView, order: str, *, back: bool = False) -> Cursor:
        return cls(ORDERS[order.removeprefix("-")](lock), back)

    @classmethod
    def parse(cls, text: str, order: str) -> Cursor | None:
        """None unless it is a cursor of this order."""
        try:
            back, *place = json.loads(text[:2000])
        except (ValueError, TypeError, RecursionError):
            return None
        nothing = LockView("", "", TaskEntry("", 0, 0), 0)
        kinds = [type(part) for part in ORDERS[order.removeprefix("-")](nothing)]
        if not isinstance(back, bool) or [type(part) for part in place] != kinds:
            return None
        return cls(tuple(place), back)


def find_from(
    app_state: AppState, wanted: Wanted, cursor: Cursor | None, seconds: float = WALK_SECONDS
) -> Found:
    """The page at the cursor; keeps no other locks. Raises StoreUnavailable."""
    found = Found()
    place_of = ORDERS[wanted.order.removeprefix("-")]
    back = cursor is not None and cursor.back
    falling = wanted.order.startswith("-") != back
    locks: Iterator[LockView] = _matching(app_state, wanted, found, monotonic() + seconds)
    if cursor is not None:
        place = cursor.place
        locks = (
            lock
            for lock in locks
            if (place_of(lock) < place if falling else place_of(lock) > place)
        )
    choose = heapq.nlargest if falling else heapq.nsmallest
    chosen = choose(PER_PAGE + 1, locks, key=place_of)
    found.more = len(chosen) > PER_PAGE
    found.locks = chosen[:PER_PAGE][:: -1 if back else 1]
    return found


def _matching(
    app_state: AppState, wanted: Wanted, found: Found, stop_at: float
) -> Iterator[LockView]:
    """Every matching lock, one for each key; counts in ``found``."""
    selection, text = wanted.selection(), wanted.text.lower()
    keys = _keys_of_idempotency_key(app_state, wanted.text)
    for key, record, now in _records(app_state, wanted.text, stop_at):
        for lock in _shown(key, record, now):
            name = lock.entry.task_name
            found.seen += 1
            found.states[lock.state] += 1
            if name in found.tasks or len(found.tasks) < MOST_NAMES:
                found.tasks[name] += 1
            searched = (name, lock.task_id, key, lock.worker, lock.entry.label)
            if not selection.matches(lock):
                continue
            if key not in keys and not any(text in part.lower() for part in searched):
                position = position_of(app_state, key, record, wanted.text)
                if not position:
                    continue
                lock = replace(lock, position=position)
            if wanted.shows(lock.state) or key == wanted.text:
                found.matched += 1
                yield lock
            elif not wanted.state:
                found.apart += 1
        if monotonic() > stop_at:
            break
    found.complete = monotonic() <= stop_at


def _shown(key: str, record: Record, now: int) -> list[LockView]:
    """What the list shows of a key: its holder, or the lane that no task holds."""
    lane = lane_of(key, record, now)
    return holders_of(key, record, now)[:1] if lane is None else [lane]


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
