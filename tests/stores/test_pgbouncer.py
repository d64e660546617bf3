"""PostgreSQL behind PgBouncer in transaction mode: no two statements need the same session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from celery_unique.stores.base import Acquired
from celery_unique.stores.sql import SqlStore
from celery_unique.testing.store_contract.factories import (
    claim,
    finish,
    fresh_key,
    run,
    running,
    start,
)
from tests.support import PgBouncerServer, PostgresServer

CLIENTS = 24

pytestmark = pytest.mark.server


@pytest.fixture
def stores(
    start_server: Callable[..., Any], postgres_server: PostgresServer, postgres_url: str
) -> Iterator[list[SqlStore]]:
    """Eight stores with three connections each, on three connections to the server."""
    pooler: PgBouncerServer = start_server(PgBouncerServer, postgres=postgres_server)
    url = pooler.url_of(postgres_url.rpartition("/")[2])
    opened = [
        SqlStore.from_url(f"{url}?through_pooler=true&pool_size=3", timeout_s=30) for _ in range(8)
    ]
    yield opened
    for store in opened:
        store.close()


def test_many_clients_share_few_connections(stores):
    keys = [fresh_key() for _ in range(20)]
    barrier = threading.Barrier(CLIENTS)

    def call(number: int) -> list[Acquired]:
        store = stores[number % len(stores)]
        barrier.wait(60)
        return [store.acquire(key, claim(f"{number} {key}")) for key in keys]

    with ThreadPoolExecutor(CLIENTS) as threads:
        told = list(threads.map(call, range(CLIENTS)))

    for place, key in enumerate(keys):
        replies = [of_client[place] for of_client in told]
        [winner] = [n for n, reply in enumerate(replies) if reply.outcome == "created"]
        named = {reply.holder.task_id for reply in replies if reply.holder}
        assert named == {f"{winner} {key}"}
        task = stores[0].read(key)[0].tasks[f"{winner} {key}"]
        assert task.duplicates == CLIENTS - 1


def test_acts_in_a_transaction_of_their_own(stores):
    """An act that was overtaken locks the row, and followers are rows of another table."""
    store, other = stores[:2]
    key = fresh_key()
    run(store, key, "a")

    with closing(other):
        for number in range(5):
            joined = other.acquire(key, claim(f"f{number}", join=f"message {number}"))
            assert joined.outcome == "joined"
    assert store.renew([running(key, "a")]) == [6]  # its own, and it has five followers
    ended = store.finish(key, finish("a", settle_later=True))

    assert ended.verdict == "ended"
    assert len(store.followers(key)) == 5
    assert store.start(key, start("a", "d2")).verdict == "wait"
