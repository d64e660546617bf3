"""One node of the store's cluster dies and nothing takes its place: calls, starts, renewals and
ends on the other nodes are as before."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery

from celery_unique import apply_many, lookup
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import BatchInterrupted, StoreUnavailable
from celery_unique.keys.digest import key_of
from celery_unique.locks import text_of_call
from celery_unique.stores.circuit_breaker import FAILURES_TO_OPEN
from tests.support import RedisCluster, eventually
from tests.workers.apps.sharded import SHARDED, is_running, let_go, sharded_app

pytestmark = [pytest.mark.slow, pytest.mark.server]

RUN_LEASE_S = 6
PATIENCE_S = 90.0


def shard(app: Celery, number: int) -> str:
    runtime = state_of(app)
    store: Any = runtime.store
    text = text_of_call(runtime, "sharded.hold", (number,), None)
    return str(store.shard_of(key_of(text, runtime.settings.key_secret)))


def test_tasks_on_the_other_nodes_keep_and_free_their_keys(redis_url, start_server, start_worker):
    cluster: RedisCluster = start_server(RedisCluster)
    settings = {
        "broker_url": redis_url,
        "result_backend": redis_url,
        "unique_store_url": cluster.url,
        "unique_run_lease": RUN_LEASE_S,
        "unique_store_timeout": 1,
        "unique_gate_timeout": 1,
    }
    app = sharded_app(**settings)
    hold = app.tasks["sharded.hold"]
    state_of(app).store.ping()
    lost = cluster.primaries()[0]
    numbers = {True: [], False: []}  # type: dict[bool, list[int]]
    for number in range(100):
        numbers[shard(app, number).endswith(f":{lost.port}")].append(number)
    dead, healthy = numbers[True], numbers[False]

    # Two tasks of the dead node start without the store, in a worker that starts after its death.
    for number in (*dead[:2], healthy[0]):
        hold.delay(number)
    state_of(app).store.flush()
    cluster.lose(lost)
    worker = start_worker(
        "tests.workers.apps.sharded",
        pool="threads",
        concurrency=8,
        env={SHARDED: json.dumps(settings)},
    )
    for number in (*dead[:2], healthy[0]):
        eventually(lambda n=number: is_running(app, n), timeout=PATIENCE_S)  # type: ignore[misc]
    began = time.monotonic()

    # Calls: the dead node's raise, and those of the others are as before.
    for number in dead[2 : 3 + FAILURES_TO_OPEN]:
        with pytest.raises(StoreUnavailable):
            hold.delay(number)
    for number in healthy[1:3]:
        assert hold.delay(number).outcome == "created"
    with pytest.raises(BatchInterrupted) as interrupted:
        apply_many([hold.s(dead[5]), hold.s(healthy[3]), hold.s(dead[6]), hold.s(healthy[4])])
    made = [result is not None for result in interrupted.value.results]
    assert made == [False, True, False, True]
    for number in healthy[1:5]:
        eventually(lambda n=number: is_running(app, n), timeout=PATIENCE_S)  # type: ignore[misc]

    # Ends: those of the dead node are retried, in vain, and those of the others free their keys.
    for number in dead[:1]:
        let_go(app, number)
    worker.wait_for_log(r"lock store unavailable \(finish of task", PATIENCE_S)
    for number in healthy[1:3]:
        let_go(app, number)
        eventually(lambda n=number: lookup(hold, (n,)) is None, timeout=PATIENCE_S)  # type: ignore[misc]

    # Renewals: for several leases, with a task of the dead node that cannot be caught up on.
    while time.monotonic() < began + 3 * RUN_LEASE_S:
        assert hold.delay(healthy[0]).deduplicated
        time.sleep(0.5)
    assert "its lock lapsed" not in worker.log()
    assert "lock store unavailable (start of task" in worker.log()
    for number in (healthy[0], *healthy[3:5]):
        let_go(app, number)
        eventually(lambda n=number: lookup(hold, (n,)) is None, timeout=PATIENCE_S)  # type: ignore[misc]
    assert "Traceback" not in worker.log()
