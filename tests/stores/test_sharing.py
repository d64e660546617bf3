"""One store, shared by threads, by greenlets, and by a process and its fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import (
    QUEUE_LEASE,
    claim,
    fresh_key,
    publish,
    task_of,
)
from tests.stores.timing import PATIENCE_S

SQLITE = pytest.param("sqlite_url")
REDIS, VALKEY, CLUSTER, POSTGRESQL, MARIADB = (
    pytest.param(f"{name}_url", marks=pytest.mark.server)
    for name in ("redis", "valkey", "cluster", "postgres", "mariadb")
)


@pytest.fixture(params=[SQLITE, REDIS, VALKEY, CLUSTER, POSTGRESQL, MARIADB])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def store(url: str) -> Iterator[LockStore]:
    store = open_store(url, namespace=fresh_key()[2:20], timeout_s=PATIENCE_S)
    with closing(store):
        yield store


def test_32_threads_share_one_store(store):
    keys = [fresh_key() for _ in range(30)]
    barrier = threading.Barrier(32)

    def call(number: int) -> list[str]:
        barrier.wait()
        winners = []
        for key in keys:
            mine = f"{number} {key}"
            acquired = store.acquire(key, claim(mine))
            store.confirm(key, mine, QUEUE_LEASE)
            winners.append(acquired.holder.task_id if acquired.holder else mine)
        return winners

    with ThreadPoolExecutor(32) as threads:
        told = list(threads.map(call, range(32)))
    store.flush()

    assert len({tuple(winners) for winners in told}) == 1
    assert all(winner.endswith(key) for winner, key in zip(told[0], keys, strict=True))
    assert {task_of(store, key, told[0][n]).state for n, key in enumerate(keys)} == {"w"}


def test_a_forked_child_never_uses_its_parents_connections(store):
    keys = {name: [fresh_key() for _ in range(60)] for name in ("child", "parent")}
    warm = fresh_key()
    publish(store, warm, "warm")

    def acts(name: str) -> bool:
        for key in keys[name]:
            created = store.acquire(key, claim(name)).outcome == "created"
            store.confirm(key, name, QUEUE_LEASE)
            other = store.acquire(key, claim("another")).holder
            if not created or other is None or other.task_id != name:
                return False
        store.flush()
        return True

    # Threads of the parent are in the middle of something at this moment.
    store.confirm(warm, "warm", QUEUE_LEASE)
    with ExitStack() as busy:
        for lock in locks_of(store):
            busy.enter_context(lock)
        pid = os.fork()
        if pid == 0:
            try:
                right = acts("child")
            except BaseException:
                right = False
            os._exit(0 if right else 1)
    parent = acts("parent")
    _, status = os.waitpid(pid, 0)

    assert parent
    assert os.waitstatus_to_exitcode(status) == 0
    assert {task_of(store, keys[name][-1], name).state for name in keys} == {"w"}


def locks_of(store: Any) -> list[Any]:
    """Those that a SQL store takes."""
    is_sql = hasattr(store, "_database")
    return [store._fire_and_forget._changed, store._database._mutex] if is_sql else []


@pytest.mark.slow
@pytest.mark.parametrize("url", [SQLITE, REDIS, POSTGRESQL, MARIADB], indirect=True)
def test_greenlets_share_one_store(url):
    program = f"""
        from gevent import monkey; monkey.patch_all()
        import gevent
        from celery_unique.stores import open_store
        from celery_unique.testing.store_contract.factories import claim, QUEUE_LEASE
        store = open_store({url!r}, namespace="greenlets", timeout_s=20)

        def call(number):
            for n in range(10):
                mine = f"{{number}} {{n}}"
                holder = store.acquire(f"1:{{n:02x}}", claim(mine)).holder
                store.confirm(f"1:{{n:02x}}", mine, QUEUE_LEASE)
            return holder.task_id if holder else mine

        calls = [gevent.spawn(call, number) for number in range(30)]
        gevent.joinall(calls, timeout=40, raise_error=True)
        store.flush()
        assert len({{call.get(block=False) for call in calls}}) == 1
        tasks = [task for _, record in store.walk() for task in record.tasks.values()]
        assert {{task.state for task in tasks}} == {{"w"}}
        assert sum(task.duplicates for task in tasks) == 290
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
