"""``worker_pool_start_method = "spawn"``: nothing is inherited, all must come by pickling."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import celery
import pytest

from celery_unique import lookup
from tests.kit import Worker, eventually

NAME = "tests.acceptance.apps.spawned"

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


def test_a_process_that_was_not_forked_takes_and_gives_back_locks(
    spawned: ModuleType, start_worker: Callable[..., Worker]
) -> None:
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
    eventually(lambda: not list(spawned.props.redis.scan_iter(match="cu:*")))
