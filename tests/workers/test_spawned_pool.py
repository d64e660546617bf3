"""``worker_pool_start_method = "spawn"``: nothing is inherited, all must come by pickling."""

from __future__ import annotations

import importlib
import sys
import urllib.request
from collections.abc import Iterator
from types import ModuleType

import celery
import pytest

from celery_unique import lookup
from tests.support import eventually
from tests.support.server import HOST, free_port

NAME = "tests.workers.apps.spawned"

pytestmark = pytest.mark.skipif(
    not hasattr(celery.Celery().conf, "worker_pool_start_method"),
    reason="worker_pool_start_method came with Celery 5.7",
)


@pytest.fixture
def spawned(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("SPAWNED_APP_URL", redis_url)
    module = importlib.import_module(NAME)
    yield module
    module.app.close()
    del sys.modules[NAME]


def test_a_process_that_was_not_forked_takes_and_gives_back_locks(spawned, start_worker):
    worker = start_worker(NAME)
    first = spawned.outer.delay("a")

    pid, key, *inner_calls = first.get(timeout=20)

    assert pid in worker.children()
    assert key == first.unique_key
    assert inner_calls == ["created", "deduplicated"]
    assert lookup(spawned.outer, ("a",)) is None
    inner = spawned.inner.delay("a")
    assert inner.deduplicated
    spawned.props.let_go("a")
    assert inner.get(timeout=20) == "a"
    failed = spawned.fail.delay("a")
    assert isinstance(failed.get(timeout=20, propagate=False), ValueError)
    assert lookup(spawned.fail, ("a",)) is None
    # Receipts of pushed messages expire.
    eventually(lambda: not list(spawned.props.redis.scan_iter(match="cu:{*}:*")))


def test_the_figures_of_a_process_that_was_not_forked_are_those_of_its_worker(
    spawned, start_worker
):
    port = free_port()
    start_worker(NAME, env={"SPAWNED_METRICS": str(port)})

    def figures() -> list[str]:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=20) as reply:
            return reply.read().decode().splitlines()

    spawned.props.let_go("a")
    first = spawned.outer.delay("a")
    assert first.get(timeout=20)[2:] == ["created", "deduplicated"]

    expected = {
        'celery_unique_acquired_total{task="spawned.inner"} 1.0',
        'celery_unique_conflicts_total{on_conflict="ignore",task="spawned.inner"} 1.0',
        'celery_unique_released_total{reason="completed",task="spawned.inner"} 1.0',
        'celery_unique_released_total{reason="completed",task="spawned.outer"} 1.0',
        'celery_unique_store_seconds_count{act="finish"} 2.0',
    }
    eventually(lambda: expected <= set(figures()), timeout=30, interval=0.1)
