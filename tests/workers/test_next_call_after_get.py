"""Once a caller has seen the result, its next call is never swallowed by the finished task."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.workers.apps.shop import make_shop

CALLS = 1000
#: Of the other ways to end, which give the key back in the same place.
FEWER_CALLS = 300


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("task", "acks_late", "calls"),
    [
        ("shop.rebuild", False, CALLS),
        ("shop.rebuild", True, FEWER_CALLS),
        ("shop.fail", False, FEWER_CALLS),
    ],
    ids=["success, early ack", "success, late ack", "failure"],
)
def test_right_after_get_the_next_call_is_admitted(
    redis_url, start_worker, report, task, acks_late, calls
):
    conf: dict[str, Any] = {
        "broker_url": redis_url,
        "result_backend": redis_url,
        "task_acks_late": acks_late,
    }
    app = make_shop(**conf)
    start_worker(
        "tests.workers.apps.shop",
        concurrency=2,
        env={"SHOP": json.dumps(conf)},
    )
    app.tasks[task].delay(7).get(timeout=30, propagate=False)

    began = time.monotonic()
    refused = 0
    for _ in range(calls):
        result = app.tasks[task].delay(7)
        refused += result.deduplicated
        result.get(timeout=30, propagate=False)

    took_ms = (time.monotonic() - began) * 1000 / calls
    report(
        f"next call after get ({task}, {'late' if acks_late else 'early'} ack): "
        f"{refused} refused of {calls}, {took_ms:.1f} ms from call to result"
    )
    assert refused == 0
