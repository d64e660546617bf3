"""A worker that comes back after another one has taken its task over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options

RUN_LEASE_S = 2.0


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(
        unique_run_lease=RUN_LEASE_S, broker_transport_options=redis_broker_options(1)
    )


def test_it_does_not_acknowledge_the_message_of_the_one_that_took_over(stage, tag):
    """In Redis both deliveries are one entry: acknowledged by the first, the message of the
    second would be gone, and with that worker's death the key taken for a whole queue lease."""
    first, second = (stage.start_worker(wait=False) for _ in range(2))
    stage.wait_until_ready(first, second)
    result = stage.call("hold_late", tag)
    if stage.wait_for_begin(tag)["worker"] != first.hostname:
        first, second = second, first

    stage.wait_until_a_body_waits()
    first.sigstop()
    assert stage.wait_for_begin(tag, 2)["worker"] == second.hostname
    first.sigcont()
    stage.props.let_go(tag)  # waited for by the first one for longest
    assert stage.end_of(result, "SUCCESS")
    eventually(lambda: f"[{result.id}] to the delivery that took it over" in first.log())
    second.kill()

    assert stage.wait_for_begin(tag, 3)["worker"] == first.hostname
    stage.props.let_go(tag)
    eventually(lambda: stage.lock("hold_late", tag) is None, message="the key is still taken")
    eventually(lambda: stage.props.redis.hlen("unacked") == 0, message="not acknowledged")
