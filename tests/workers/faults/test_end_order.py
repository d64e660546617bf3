"""A worker dies between two steps at the end of a task that is acknowledged late.

The steps: its end is told, the result stored, the message acknowledged, the record let go.
All workers die at the same time, and one takes over the queues of all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.support import eventually
from tests.support.stage import Stage
from tests.support.worker import Worker
from tests.workers.apps.dying import DIES_BEFORE, RESULT, SETTLING
from tests.workers.apps.faults import redis_broker_options

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0
POOLS = ("prefork", "threads", "gevent", "solo")
DEATHS = [(RESULT, "prefork"), *((SETTLING, pool) for pool in POOLS)]


class Dead(NamedTuple):
    """What a worker left behind, that died in the only task of its queue."""

    queue: str
    result: Any
    was_acknowledged: bool


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    """Redis takes a message for lost after a second."""
    return make_stage(
        unique_run_lease=RUN_LEASE_S, broker_transport_options=redis_broker_options(1)
    )


@pytest.fixture(scope="module", autouse=True)
def dead(stage: Stage) -> dict[tuple[str, str], Dead]:
    queues = {(step, pool): f"{step}-{pool}" for step, pool in DEATHS}
    workers = [
        stage.start_worker(wait=False, pool=pool, queues=[queue], env={DIES_BEFORE: step})
        for (step, pool), queue in queues.items()
    ]
    stage.wait_until_ready(*workers)
    results = [stage.call("quick_late", queue, queue=queue) for queue in queues.values()]
    for worker in workers:
        eventually(lambda worker=worker: not worker.is_running(), message="it does not die")

    dead = {
        death: Dead(queue, result, not _has_message(stage, queue, result.id))
        for (death, queue), result in zip(queues.items(), results, strict=True)
    }
    stage.start_worker(queues=list(queues.values()))
    return dead


def _has_message(stage: Stage, queue: str, task_id: str) -> bool:
    redis = stage.props.redis
    return any(
        task_id in message for message in redis.hvals("unacked") + redis.lrange(queue, 0, -1)
    )


def test_result_that_a_killed_worker_could_not_store_is_stored_by_a_second_run(stage, dead):
    """A done mark that was left with the end of the body would drop the message."""
    queue, result, was_acknowledged = dead[RESULT, "prefork"]
    assert not was_acknowledged

    assert stage.end_of(result, "SUCCESS") == queue

    assert [run["id"] for run in stage.begins(queue)] == [result.id, result.id]
    stage.assert_only_a_mark_left(result)


@pytest.mark.parametrize("pool", POOLS)
def test_task_whose_worker_is_killed_before_it_lets_go_of_the_record_does_not_run_again(
    stage, dead, pool
):
    """The message is acknowledged by then. The other way round, a message that comes back
    would find nothing, and run beside the next task."""
    queue, result, was_acknowledged = dead[SETTLING, pool]
    assert was_acknowledged
    assert stage.end_of(result, "SUCCESS") == queue

    # What the dead worker has left blocks nobody.
    second = stage.call("quick_late", queue, queue=queue)
    assert stage.end_of(second, "SUCCESS") == queue

    # Whatever was not acknowledged has come back by now.
    stage.end_of(dead[RESULT, "prefork"].result, "SUCCESS")
    assert [run["id"] for run in stage.begins(queue)] == [result.id, second.id]


def call_two_at_one_moment(
    stage: Stage, worker: Worker, tag: str, **options: Any
) -> tuple[str, Any, Any]:
    """The tag of the calls, and their results: a solo worker acknowledges the first after the
    second, which waits for a word."""
    for seconds in (1.5, 6, 24):  # a busy machine may be late for the first
        stage.props.let_go(tag)  # so that no task waits for it without effect
        tag = f"{tag}-{seconds}"
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        result = stage.call("quick_late", tag, eta=at, **options)
        other = stage.call("hold", tag, eta=at + timedelta(milliseconds=1))
        for each in (result, other):
            worker.wait_for_log(rf"{each.id}\] received")
        if datetime.now(UTC) < at:
            break
    return tag, result, other


def test_task_whose_acknowledgement_waits_behind_another_task_runs_once(make_stage, tag):
    """A solo worker sends it in the next turn of its event loop: after the other task, if both
    have waited for the same moment."""
    stage = make_stage(
        pool="solo",
        unique_run_lease=RUN_LEASE_S,  # would lapse before the message comes back
        broker_transport_options=redis_broker_options(RUN_LEASE_S + 2),
    )
    worker = stage.start_worker()
    tag, result, other = call_two_at_one_moment(stage, worker, tag)

    second = stage.start_worker()
    assert stage.end_of(result, "SUCCESS") == tag
    # The first worker keeps on saying that it has the message.
    second.wait_for_log(rf"held back \S+{result.id}\]", timeout=20)
    # Redis delivers the other one again as well, since its acknowledgement, too, is only sent
    # after the body. If it came after that end, it would run once more and wait for a word.
    second.wait_for_log(rf"held back \S+{other.id}\]", timeout=20)
    stage.props.let_go(tag)

    stage.end_of(other, "SUCCESS")
    second.wait_for_log(rf"dropped \S+{result.id}\]: it has already finished")
    assert [run["id"] for run in stage.begins(tag)] == [result.id, other.id]


def test_idempotency_key_is_held_until_the_message_is_acknowledged(make_stage, tag):
    """Its time is over by then, but the task would run again if its message came back."""
    stage = make_stage(
        pool="solo", unique_run_lease=RUN_LEASE_S, broker_transport_options=redis_broker_options(60)
    )
    key = {"idempotency_key": tag, "idempotency_ttl": 0.5}
    worker = stage.start_worker()
    tag, result, other = call_two_at_one_moment(stage, worker, tag, **key)
    call = partial(stage.app.tasks["quick_late"].apply_async, (tag,), **key)
    assert stage.end_of(result, "SUCCESS") == tag
    eventually(lambda: other.id in [run["id"] for run in stage.begins(tag)])

    while_it_waits = call()
    stage.props.let_go(tag)
    stage.end_of(other, "SUCCESS")

    assert (while_it_waits.id, while_it_waits.deduplicated) == (result.id, True)
    eventually(lambda: not call().deduplicated)
