"""Locks in this process: for tests, and for apps whose broker is ``memory://``."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar
from uuid import uuid4

from celery_unique.exceptions import ConfigurationError

from .base import Guarantee
from .diagnosis import Diagnosis
from .record import MarksInMemory, Record
from .record_payloads import PayloadsInMemory
from .record_store import RecordedStore

Reply = TypeVar("Reply")

#: Every store of this process: a forked child creates a new mutex for each, since a thread of the
#: parent may have locked the old one.
_stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


class MemoryStore(RecordedStore):
    """A dictionary behind a mutex, with the semantics of every other store."""

    guarantee: Guarantee = "strong"
    mechanism = "one dictionary behind a mutex, in one process"

    def __init__(self) -> None:
        self.clock_offset_ms = 0
        self._records: dict[str, Record] = {}
        self._due: dict[str, int] = {}  # when to reap each key that has followers
        self._mutex = threading.Lock()
        self.identity = uuid4().hex
        _stores.add(self)

    @classmethod
    def from_url(cls, url: str, **options: object) -> MemoryStore:
        """Every app has its own store: namespace and time-out are ignored."""
        if url.partition("://")[2]:
            raise ConfigurationError(
                "unique_store_url: memory:// has neither names nor options, for every app has one "
                "such store of its own. Write memory:// and nothing after it.",
                setting="unique_store_url",
            )
        return cls()

    def fingerprint(self) -> str:
        return "memory"

    def _now_us(self) -> int:
        return time.time_ns() // 1000 + self.clock_offset_ms * 1000

    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        with self._mutex:
            record = self._records.get(key) or Record()
            reply = act(record, self._now_us())
            if record:
                self._records[key] = record
            else:
                self._records.pop(key, None)
            if record.following is not None:
                self._due[key] = record.following.due_at
            else:
                self._due.pop(key, None)
            return reply

    def due(self, limit: int = 20) -> list[str]:
        with self._mutex:
            now = self._now_us() // 1000
            due = [key for key, due_at in self._due.items() if due_at <= now]
            return sorted(due, key=lambda key: self._due[key])[:limit]

    def read(self, key: str) -> tuple[Record, int]:
        with self._mutex:
            now = self._now_us() // 1000
            record = deepcopy(self._without_the_rest(key))
        record.purge(now)
        return record, now

    def _without_the_rest(self, key: str) -> Record:
        """What other stores have in the record itself: the rest may be large."""
        record = self._records.get(key) or Record()
        rest: dict[str, object] = {"beside": MarksInMemory(), "payloads": PayloadsInMemory()}
        return replace(record, followers={}, **rest)  # type: ignore[arg-type]

    def payload(self, key: str, task_id: str) -> str:
        """What the task runs with, see ``record_payloads``; for tests of users."""
        with self._mutex:
            return self._records.get(key, Record()).payloads.text(task_id)

    def walk(self, batch: int = 500, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        for key in list(self._records):
            record, _ = self.read(key)
            if record:
                yield key, record
            if time.monotonic() > stop_at:
                return

    def sweep(self, batch: int = 500) -> int:
        with self._mutex:
            now = self._now_us() // 1000
            lapsed = [k for k, r in self._records.items() if r.latest_deadline() <= now][:batch]
            for key in lapsed:
                del self._records[key]
                self._due.pop(key, None)
            return len(lapsed)

    def ping(self) -> None:
        """Always available."""

    def diagnose(self) -> Diagnosis:
        return Diagnosis("process", {"server": "this process"})

    def flush(self, timeout_s: float | None = None) -> None:
        """No act is fire-and-forget here."""

    def close(self) -> None:
        """Nothing to close; the locks stay for the next use."""


def _fresh_mutexes() -> None:
    for store in _stores:
        store._mutex = threading.Lock()


os.register_at_fork(after_in_child=_fresh_mutexes)
