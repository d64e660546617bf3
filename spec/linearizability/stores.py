"""How a process opens a store; and three stores that are not atomic, which must be caught."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import redis

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Record
from celery_unique.stores.redis import RedisStore
from celery_unique.stores.sql import SqlStore

Reply = TypeVar("Reply")

#: Imported once, before the processes are forked.
IMPORTED = (RedisStore, SqlStore)


def opened(url: str, namespace: str) -> LockStore:
    store = open_store(url, namespace=namespace, timeout_s=60.0)
    store.ping()
    return store


class ReadsThenWrites(MemoryStore):
    """Reads the record, runs the act on its copy and writes that, without a lock."""

    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        record = deepcopy(self._records.get(key) or Record())
        reply = act(record, self._now_us())
        if random.random() < 0.05:
            time.sleep(0)  # another thread's turn
        self._records[key] = record
        return reply


class ReadsAreOld(MemoryStore):
    """Acts are atomic, but some reads return a record as it was a while ago, as a replica would."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[str, tuple[Record, int]] = {}

    def read(self, key: str) -> tuple[Record, int]:
        fresh = super().read(key)
        if random.random() < 0.3:
            return self._old.get(key, fresh)
        self._old[key] = fresh
        return fresh


class RedisWithoutScripts(MemoryStore):
    """GET, the act in Python, SET: what a first draft of a Redis store looks like."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._client = redis.Redis.from_url(url)
        self._client.ping()

    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        stored = self._client.get(key)
        record = pickle.loads(stored) if isinstance(stored, bytes) else Record()
        reply = act(record, self._now_us())
        self._client.set(key, pickle.dumps(record))
        return reply

    def read(self, key: str) -> tuple[Record, int]:
        def seen(record: Record, us: int) -> tuple[Record, int]:
            record.purge(us // 1000)
            return record, us // 1000

        return self._act(key, seen)
