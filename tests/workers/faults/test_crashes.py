"""A worker dies, or stands still for too long, in the middle of a task."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support import RabbitMQServer, eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options
from tests.workers.faults.caller import Caller

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0
RENEWAL_S = RUN_LEASE_S / 3


@pytest.fixture(scope="module")
def redis_stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(
        unique_run_lease=RUN_LEASE_S, broker_transport_options=redis_broker_options(2)
    )


@pytest.fixture(scope="module")
def rabbitmq_stage(make_stage: Callable[..., Stage], rabbitmq_server: RabbitMQServer) -> Stage:
    return make_stage(broker=rabbitmq_server.fresh_url(), unique_run_lease=RUN_LEASE_S)


@pytest.fixture(params=["redis", "rabbitmq"])
def stage(request: pytest.FixtureRequest, redis_stage: Stage) -> Stage:
    return redis_stage if request.param == "redis" else request.getfixturevalue("rabbitmq_stage")


def test_key_of_an_early_acknowledged_task_is_free_within_the_run_lease_of_a_sigkill(
    redis_stage, tag
):
    stage = redis_stage
    worker = stage.ensure_worker()
    first = stage.call("hold", tag)
    stage.wait_for_begin(tag)

    worker.kill()
    killed_at = time.time()
    lease = stage.entry("hold", tag).lease / 1000
    with Caller(stage, "hold", tag) as caller:
        admitted = caller.wait_for_admission()

    took_s = admitted.at - killed_at
    swallowed = [answer for answer in caller.answers if answer.at < admitted.at]
    print(f"free {took_s:.2f} s after SIGKILL; {len(swallowed)} calls before were duplicates")
    assert {answer.task_id for answer in swallowed} == {first.id}
    # How late the calls are is up to the machine; when the lock lapses is not.
    assert lease <= killed_at + RUN_LEASE_S
    assert admitted.at >= lease
    assert caller.admitted == [admitted]
    stage.props.let_go(tag)  # the admitted task waits for the next worker


def test_late_acknowledged_task_of_a_killed_worker_runs_again_and_nothing_beside_it(stage, tag):
    worker = stage.ensure_worker()
    first = stage.call("hold_first", tag)
    begun = stage.wait_for_begin(tag)

    with Caller(stage, "hold_first", tag) as caller:
        worker.kill()
        killed_at = time.time()
        stage.start_worker()
        again = stage.wait_for_begin(tag, 2, timeout=30)
        eventually(lambda: stage.app.AsyncResult(first.id).state == "SUCCESS")
        eventually(lambda: caller.answers)

    print(f"{len(caller.answers)} calls; run again {again['at'] - killed_at:.2f} s after SIGKILL")
    assert again["id"] == begun["id"] == first.id
    assert again["token"] > begun["token"]
    before_the_end = [answer for answer in caller.answers if answer.at < again["at"]]
    assert len(before_the_end) > 2
    assert {(answer.outcome, answer.task_id) for answer in before_the_end} == {
        ("deduplicated", first.id)
    }


@pytest.fixture
def two_workers(redis_stage: Stage) -> Stage:
    while sum(worker.is_running() for worker in redis_stage.workers) < 2:
        redis_stage.start_worker()
    return redis_stage


def test_worker_that_was_frozen_past_its_lease_leaves_the_new_holder_alone(two_workers, tag):
    stage = two_workers
    first = stage.call("hold", tag)
    begun = stage.wait_for_begin(tag)
    frozen = next(w for w in stage.workers if w.hostname == begun["worker"])

    stage.wait_until_a_body_waits()
    frozen.sigstop()
    with Caller(stage, "hold", tag) as caller:
        second = caller.wait_for_admission()
    second_run = stage.wait_for_begin(tag, 2)
    held = stage.entry("hold", tag)
    assert second_run["id"] == second.task_id != first.id
    assert second_run["worker"] != begun["worker"]
    assert second_run["token"] > begun["token"]

    # The frozen worker goes on: it hears that it has lost the lock while its body still runs.
    frozen.sigcont()
    lost = stage.wait_for_signal(first.id, "unique_lost")
    assert lost["pid"] == frozen.pid
    assert lost["reason"] == "its lock lapsed while it was running"
    assert stage.signals(second.task_id, "unique_lost") == []

    # Its body ends: the word is for whichever body waits longer, which is the first one.
    stage.props.let_go(tag)
    end = eventually(lambda: stage.ends(tag))[0]
    assert (end["id"], end["still_mine"]) == (first.id, False)
    eventually(lambda: len(stage.signals(first.id, "unique_lost")) == 2)

    now = stage.entry("hold", tag)
    assert (now.delivery, now.token, now.state) == (held.delivery, held.token, "r")
    assert now.lease >= held.lease
    assert stage.duplicate("hold", tag).id == second.task_id

    stage.props.let_go(tag)
    end = eventually(lambda: stage.ends(tag)[1:])[0]
    assert (end["id"], end["still_mine"]) == (second.task_id, True)
    stage.wait_until_free("hold", tag)


def test_frozen_delivery_leaves_the_second_delivery_of_its_task_alone(two_workers, tag):
    """Redis delivers the message again: the same task id, and still another owner."""
    stage = two_workers
    result = stage.call("hold_late", tag)
    begun = stage.wait_for_begin(tag)
    frozen = next(w for w in stage.workers if w.hostname == begun["worker"])

    stage.wait_until_a_body_waits()
    frozen.sigstop()
    again = stage.wait_for_begin(tag, 2, timeout=20)
    held = stage.entry("hold_late", tag)
    assert (again["id"], begun["id"]) == (result.id, result.id)
    assert again["token"] > begun["token"]

    frozen.sigcont()
    lost = stage.wait_for_signal(result.id, "unique_lost")
    assert lost["pid"] == frozen.pid
    stage.props.let_go(tag)
    end = eventually(lambda: stage.ends(tag))[0]
    assert end["still_mine"] is False
    # Its end is told to nobody's loss: the body and, as the message is acknowledged, the worker.
    eventually(lambda: f"Task hold_late[{result.id}] succeeded" in frozen.log())
    now = stage.entry("hold_late", tag)
    assert (now.delivery, now.token, now.state) == (held.delivery, held.token, "r")
    assert stage.duplicate("hold_late", tag).id == result.id

    stage.props.let_go(tag)
    end = eventually(lambda: stage.ends(tag)[1:])[0]
    assert end["still_mine"] is True
    stage.wait_until_free("hold_late", tag)


def test_task_that_waited_for_a_thread_of_a_killed_worker_runs_all_the_same(make_stage, tag):
    """Celery hands it to the thread pool before a thread is free, so its lock has the run lease
    of a running task and lapses, although its message comes back."""
    stage = make_stage(
        pool="threads",
        unique_run_lease=1,
        broker_transport_options=redis_broker_options(2),
    )
    worker = stage.start_worker()
    stage.call("hold", f"{tag}-busy")
    stage.wait_for_begin(f"{tag}-busy")
    waiting = stage.call("quick", tag)
    stage.wait_for_state("quick", tag, state="active")

    worker.kill()
    stage.wait_until_free("quick", tag)
    stage.start_worker()

    stage.end_of(waiting, "SUCCESS")
    assert [run["id"] for run in stage.begins(tag)] == [waiting.id]
    lost = stage.wait_for_signal(waiting.id, "unique_lost")
    assert lost["reason"] == "its lock had lapsed before it started"
