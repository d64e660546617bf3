"""A store's server can be broken as the chaos test does it: its clock, its memory and its disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import QUEUE_LEASE, claim, fresh_key, publish
from tests.chaos.stores import OneServer, lock_servers
from tests.support import RedisServer, SmallDisk, eventually

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def servers() -> Iterator[OneServer]:
    servers = lock_servers("valkey", clock=True, disk=True)
    assert isinstance(servers, OneServer)
    with servers.opened:
        yield servers


@pytest.fixture
def store(servers: OneServer) -> Iterator[LockStore]:
    with closing(open_store(servers.url, timeout_s=5)) as store:
        yield store


@pytest.fixture
def client(servers: OneServer) -> Iterator[redis.Redis]:
    assert isinstance(servers.server, RedisServer)
    with servers.server.client() as client:
        yield client


def test_a_clock_that_is_set_ahead_ends_a_lease_at_once(servers, store):
    clock = servers.server.clock
    assert clock is not None
    key = fresh_key()
    publish(store, key, "holder")
    assert store.acquire(key, claim("duplicate")).outcome == "duplicate"

    clock.shift(QUEUE_LEASE / 1000 + 1)

    try:  # Valkey looks at the clock ten times a second
        eventually(lambda: store.acquire(key, claim("next")).outcome == "created")
    finally:
        clock.shift(0)


def test_a_store_without_memory_refuses_and_tells_how_often(servers, store):
    key = fresh_key()

    with servers.out_of_memory() as told, pytest.raises(StoreUnavailable):
        store.acquire(key, claim("refused"))

    assert told["refused"] >= 1
    assert store.acquire(key, claim("accepted")).outcome == "created"


def test_the_records_that_are_evicted_are_named(servers, store, client):
    client.flushdb()  # the records of other tests may go, too
    keys = [fresh_key() for _ in range(40)]
    for number, key in enumerate(keys):
        publish(store, key, f"task{number}")

    told = {"evicted": []}
    for _ in range(5):
        told = servers.evict(random.Random(1))
        if told["evicted"]:
            break

    assert told["evicted"]
    assert told["others"]
    gone = {key for key in keys if not client.keys(f"cu:*:{key}")}
    assert {name.partition(":")[2].partition(":")[2] for name in told["evicted"]} == gone
    assert client.config_get("maxmemory")["maxmemory"] == "0"


@pytest.mark.skipif(not SmallDisk.is_possible(), reason="only root may mount a file system")
def test_a_full_disk_ends_a_redis_that_writes_its_file_and_nothing_is_lost(servers, store):
    key = fresh_key()
    publish(store, key, "holder")
    assert servers.server.disk is not None

    servers.fill_disk()
    eventually(lambda: not _accepts(store))  # the last page of the file may have room

    assert servers.empty_disk() == "went down"
    assert store.acquire(key, claim("duplicate")).outcome == "duplicate"


def _accepts(store: LockStore) -> bool:
    try:
        return store.acquire(fresh_key(), claim("refused")).outcome == "created"
    except StoreUnavailable:
        return False
