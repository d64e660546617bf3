"""What a lock takes in Redis, in bytes: by ``used_memory``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from benchmarks.servers import server
from benchmarks.storage import Bytes
from celery_unique.keys.digest import key_of
from celery_unique.stores import open_store

pytestmark = pytest.mark.server

#: Redis doubles its tables as keys grow: as full a table as that of 100,000 locks.
LOCKS = 25_600


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Any]]:
    with server() as own:
        store = open_store(own.url(), namespace="", timeout_s=60.0)
        yield Bytes(own, store, LOCKS).figures()
        store.close()


def test_a_waiting_lock_takes_little_more_than_a_bare_set(figures):
    assert figures["times_bare"]["waiting"] <= 1.6


@pytest.mark.parametrize("kind", ["waiting, long task name", "waiting, with duplicates"])
def test_it_takes_less_than_twice_that_with_a_long_name_and_with_duplicates(figures, kind):
    # Averaged over a tenth of the locks, where what else the server does with its memory shows.
    assert figures["times_bare"][kind] <= 1.95


@pytest.mark.parametrize("make", [Bytes._waiting_long, Bytes._with_duplicates])
def test_it_stays_packed_with_a_long_name_and_with_duplicates(redis_url, make):
    store = open_store(redis_url, namespace="", timeout_s=60.0)
    pairs = [(key_of(str(number)), str(uuid.uuid4())) for number in range(20)]

    make(Bytes(None, store, len(pairs)), pairs)

    store.flush()
    with redis.Redis.from_url(redis_url) as client:
        names = [store._layout.name_of(key) for key, _ in pairs]
        encodings = {client.object("encoding", name) for name in names}
    store.close()
    assert encodings <= {b"listpack", b"ziplist"}  # the latter before Redis 7
