"""A debounce that goes on and on: one key is replaced thousands of times, with a real worker.

CELERY_UNIQUE_REPLACES says how often: ``make test-many`` makes 100,000 replaces.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from celery_unique.config.app_state import state_of
from celery_unique.stores.record import MARKS_INLINE
from tests.support import eventually
from tests.support.stage import Stage

REPLACES = int(os.environ.get("CELERY_UNIQUE_REPLACES", "600"))
SLICES = 10
#: For the worker to reach all messages: many times what a machine with two cores needs.
PATIENCE_S = 120 + REPLACES * 0.05

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S)]


def test_a_key_that_is_replaced_again_and_again(redis_server, tmp_path, report):
    url = redis_server.fresh_url()
    options: Any = {"broker": url, "redis_url": url, "unique_run_lease": 15}
    stage = Stage("replacing", tmp_path, pool="threads", **options)
    try:
        stage.start_worker(concurrency=2)
        other = stage.send("hold_on", "another key")  # it runs until the end of this test
        stage.wait_for_runs("another key")
        figures: list[str] = []
        client, store = stage.props.redis, state_of(stage.app).store

        last: Any = None
        fields = []
        for part in range(SLICES):
            began, before = time.monotonic(), _script_seconds(client)
            for n in range(part * REPLACES // SLICES, (part + 1) * REPLACES // SLICES):
                last = stage.send("debounce", "the key", n, countdown=1, queue="held")
            store.flush()
            calls = REPLACES / SLICES
            took = (time.monotonic() - began) / calls * 1000
            scripts = (_script_seconds(client) - before) / calls * 1e6
            figures.append(f"{took:.2f} ms a call, {scripts:.0f} us of the server's scripts")
            fields.append(client.hlen(store._layout.name_of(last.unique_key)))  # type: ignore[attr-defined]
        # A name, a token perhaps, the line on the marks beside, and what is in limbo.
        assert max(fields) <= MARKS_INLINE + 6

        began = time.monotonic()
        stage.app.control.add_consumer("held", reply=True)
        stage.wait_for_runs("the key", timeout=PATIENCE_S)
        eventually(
            lambda: not client.llen("held") and not client.hlen("unacked"),
            timeout=PATIENCE_S,
            message="not all messages were reached",
        )
        dropped_s = time.monotonic() - began
        assert stage.values("the key") == [REPLACES - 1]
        stage.wait_until_nothing_is_left(last.unique_key, timeout=PATIENCE_S)

        held = stage.record_of(other.unique_key).tasks[other.id]
        assert held.state == "r"
        assert not stage.workers[-1].log().count("its lock lapsed")
    finally:
        stage.props.let_go("another key")
        stage.close()
    report(
        f"{REPLACES} replaces of one key: first {figures[0]}; middle {figures[SLICES // 2]}; last "
        f"{figures[-1]}; {dropped_s:.1f} s until all messages were reached, 0 replaced bodies run, "
        "the lock of another task kept"
    )


def _script_seconds(client: Any) -> float:
    """What the server has spent on scripts."""
    stats = client.info("commandstats")
    found = (stats.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("eval", "evalsha"))
    return float(sum(found)) / 1e6
