"""A worker that is told to stop while a task is past the gate and waits for a thread."""

from __future__ import annotations

import signal
import time

import celery
import pytest

from tests.support import eventually
from tests.workers.apps.faults import redis_broker_options

#: Long enough for a worker on a busy machine to renew it in time.
RUN_LEASE_S = 3.0


@pytest.mark.skipif(
    tuple(map(int, celery.__version__.split(".")[:2])) < (5, 7),
    reason="up to Celery 5.6 a stopping thread pool runs what waits",
)
def test_its_key_does_not_lapse_however_long_the_shutdown_takes(make_stage, tag):
    stage = make_stage(pool="threads", unique_run_lease=RUN_LEASE_S)
    worker = stage.start_worker()
    running = stage.call("hold", tag)
    stage.wait_for_begin(tag)
    waiting = stage.call("hold", f"waiting-{tag}")
    eventually(lambda: stage.entry("hold", f"waiting-{tag}").state == "r", message="not started")

    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    time.sleep(1.2 * RUN_LEASE_S)
    assert stage.duplicate("hold", f"waiting-{tag}").id == waiting.id
    stage.props.let_go(tag)
    # No second signal: at the very end of a process it kills.
    eventually(lambda: not worker.is_running(), timeout=30)
    assert worker.exit_code == 0

    assert stage.end_of(running, "SUCCESS")
    stage.start_worker()
    stage.props.let_go(f"waiting-{tag}")
    assert stage.end_of(waiting, "SUCCESS")
    assert stage.signals(waiting.id, "unique_lost") == []


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_ends_in_the_shutdown_of_its_worker_does_not_run_again(make_stage, tag, pool):
    """Its acknowledgement may wait until the whole pool has ended, and Redis does not."""
    stage = make_stage(
        pool=pool, unique_run_lease=60, broker_transport_options=redis_broker_options(2)
    )
    worker = stage.start_worker(concurrency=2)
    ends, goes_on = (stage.call("hold_late", f"{name}-{tag}") for name in ("ends", "goes-on"))
    for name in ("ends", "goes-on"):
        stage.wait_for_begin(f"{name}-{tag}")
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    stage.props.let_go(f"ends-{tag}")
    assert stage.end_of(ends, "SUCCESS")

    other = stage.start_worker()
    # By then whatever was not acknowledged has been delivered to it.
    other.wait_for_log(f"{goes_on.id}.* received")
    time.sleep(1)
    stage.props.let_go(f"goes-on-{tag}")

    # No second signal: at the very end of a process it kills.
    eventually(lambda: not worker.is_running(), timeout=30)
    assert worker.exit_code == 0
    assert stage.end_of(goes_on, "SUCCESS")
    assert len(stage.begins(f"ends-{tag}")) == 1
