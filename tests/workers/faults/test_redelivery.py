"""Redis delivers a message again while its task waits or runs: the body still runs once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import celery
import pytest

from tests.support import Worker, eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options
from tests.workers.redelivery import looking_for_lost_messages

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0
#: How long a waiting delivery sleeps before it asks again.
ASK_AGAIN_S = 1.0
#: What a busy machine may add. A delivery that does not ask again waits for ever.
SLACK_S = 10.0


POOLS = ["prefork", "threads", "gevent", "solo"]
#: A solo worker takes a message when it has room for its task, and not before: the message
#: stays in the broker while another task runs, and Redis has no reason to deliver it again.
reserving_pools = pytest.mark.parametrize("stage", ["prefork", "threads", "gevent"], indirect=True)

#: Up to Celery 5.6 the first task's own message comes back to greenlets and takes their room.
KEEP_COPIES_OUT = ["prefork", "threads", *(["gevent"] if celery.VERSION[:2] >= (5, 7) else [])]
pools_that_keep_copies_out = pytest.mark.parametrize("stage", KEEP_COPIES_OUT, indirect=True)


@pytest.fixture(scope="module", params=POOLS)
def stage(request: pytest.FixtureRequest, make_stage: Callable[..., Stage]) -> Iterator[Stage]:
    """Redis takes a message for lost after a second."""
    stage = make_stage(
        pool=request.param,
        unique_run_lease=RUN_LEASE_S,
        broker_transport_options=redis_broker_options(1),
    )
    if request.param == "gevent":
        with looking_for_lost_messages(stage.app):
            yield stage
    else:
        yield stage
    for worker in stage.workers:  # not to look on while the next pool works
        worker.kill()


@pytest.fixture
def workers(stage: Stage) -> list[Worker]:
    """Two workers with room for one task each."""
    missing = 2 - sum(worker.is_running() for worker in stage.workers)
    stage.wait_until_ready(*[stage.start_worker(wait=False) for _ in range(missing)])
    return stage.workers[-2:]


def waits_in(worker: Worker, task_id: str) -> bool:
    return f"[{task_id}]: another delivery or its predecessor is running" in worker.log()


def drops(stage: Stage, task_id: str) -> int:
    """How many deliveries were dropped since the task had ended."""
    return len(re.findall(rf"dropped \S+\[{task_id}\]: it has already finished", stage.log()))


def queued(stage: Stage) -> int:
    """Messages that no worker has, or has not acknowledged."""
    redis = stage.props.redis
    return int(redis.llen("celery")) + int(redis.hlen("unacked"))


def test_late_acknowledged_task_longer_than_the_visibility_timeout_runs_once(stage, workers, tag):
    result = stage.call("hold_late", tag)
    runs_in = stage.wait_for_begin(tag)["worker"]
    [other] = [worker for worker in workers if worker.hostname != runs_in]

    eventually(lambda: any(waits_in(worker, result.id) for worker in workers))
    # The waiting twin has no slot of the pool: another task runs in the other worker's only one.
    for _ in range(2):  # Redis hands them out in turn
        stage.app.tasks["quick_plain"].delay(f"plain-{tag}")
    assert stage.wait_for_begin(f"plain-{tag}")["worker"] == other.hostname
    # Longer than its lease: it asks again and again, and is told to wait.
    time.sleep(RUN_LEASE_S + ASK_AGAIN_S)
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    eventually(lambda: drops(stage, result.id) > 0)
    eventually(lambda: queued(stage) == 0)
    assert [(run["id"], run["retries"]) for run in stage.begins(tag)] == [(result.id, 0)]
    assert stage.signals(result.id, "unique_lost") == []
    stage.assert_only_a_mark_left(result)


@reserving_pools
def test_early_acknowledged_task_that_waits_behind_another_runs_once(stage, workers, tag):
    """Its message is not acknowledged while it is reserved, so Redis delivers it again."""
    blockers = [stage.call("hold", f"{tag}-{n}") for n in range(2)]
    runs_in = {stage.wait_for_begin(f"{tag}-{n}")["worker"]: f"{tag}-{n}" for n in range(2)}

    result = stage.call("hold", tag)
    eventually(lambda: received(stage, result.id) >= 3, message="not redelivered")
    # A pool takes tasks before it has room: it waits in the worker that was first to take it.
    lock = stage.lock("hold", tag)
    stage.props.let_go(runs_in.pop(lock.worker or workers[0].hostname))
    stage.wait_for_begin(tag)
    # The copies in both workers come to the gate now, and wait for the one that runs.
    for blocker in runs_in.values():
        stage.props.let_go(blocker)
    stage.props.let_go(tag)

    for each in (*blockers, result):
        stage.end_of(each, "SUCCESS")
    eventually(lambda: queued(stage) == 0, message="messages are left")
    assert len(stage.begins(tag)) == 1
    assert stage.signals(result.id, "unique_lost") == []


def test_eta_beyond_the_visibility_timeout_runs_once(stage, workers, tag):
    tasks = ("quick", "quick_late")
    results = [stage.call(task, f"{task}-{tag}", countdown=4) for task in tasks]

    for result in results:
        eventually(lambda result=result: received(stage, result.id) >= 2, message="not redelivered")
        stage.end_of(result, "SUCCESS")
    eventually(lambda: queued(stage) == 0, message="messages are left")

    for task, result in zip(tasks, results, strict=True):
        print(f"{task}: delivered {received(stage, result.id)} times")
        assert len(stage.begins(f"{task}-{tag}")) == 1
        # Nobody waits for the last word on a task that was acknowledged late.
        stage.wait_until_free(task, f"{task}-{tag}")


def test_waiting_delivery_runs_within_a_run_lease_of_the_death_of_the_first(stage, workers, tag):
    result = stage.call("hold_first", tag)
    runs_in = stage.wait_for_begin(tag)["worker"]
    [first] = [worker for worker in workers if worker.hostname == runs_in]
    [other] = [worker for worker in workers if worker is not first]
    # Redis chooses who gets the second delivery, and on a busy machine it was the first worker
    # again and again.
    stage.app.control.cancel_consumer("celery", destination=[first.hostname])
    eventually(lambda: waits_in(other, result.id), timeout=60)

    first.kill()
    killed_at = time.time()

    again = stage.wait_for_begin(tag, 2)
    print(f"the waiting delivery ran {again['at'] - killed_at:.2f} s after SIGKILL")
    assert again["at"] - killed_at < RUN_LEASE_S + ASK_AGAIN_S + SLACK_S
    assert (again["id"], again["worker"], again["retries"]) == (result.id, other.hostname, 0)
    stage.end_of(result, "SUCCESS")


def test_task_whose_connection_to_rabbitmq_broke_runs_once(
    make_stage, rabbitmq_server, start_proxy, tag
):
    """RabbitMQ delivers its message again at once, and it cannot be acknowledged any more."""
    url = rabbitmq_server.fresh_url()
    proxy = start_proxy(rabbitmq_server.port)
    stage = make_stage(broker=url, unique_run_lease=RUN_LEASE_S)
    worker = stage.start_worker(settings={"broker": proxy.url_of(url)})
    result = stage.call("hold_late", tag)
    stage.wait_for_begin(tag)

    proxy.cut()
    worker.wait_for_log("Connection to broker lost")
    proxy.restore()
    eventually(lambda: waits_in(worker, result.id), timeout=20)
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    eventually(lambda: drops(stage, result.id) == 1)
    assert len(stage.begins(tag)) == 1
    assert stage.signals(result.id, "unique_lost") == []
    worker.stop()


def received(stage: Stage, task_id: str) -> int:
    return len(re.findall(rf"Task \w+\[{task_id}\] received", stage.log()))


@pools_that_keep_copies_out
def test_copy_that_no_worker_has_seen_yet_does_not_run_after_the_end(stage, tag):
    """The worker has room for one message: the copy stays in the broker until the end."""
    narrow = stage.start_worker(queues=["narrow"], args=["--prefetch-multiplier", "1"])
    blocker = stage.call("hold", f"{tag}-0", queue="narrow")
    stage.wait_for_begin(f"{tag}-0")

    result = stage.call("quick", tag, queue="narrow")
    eventually(lambda: received(stage, result.id) == 1)
    eventually(lambda: stage.props.redis.llen("narrow") == 1, message="not redelivered")
    stage.props.let_go(f"{tag}-0")

    for each in (blocker, result):
        stage.end_of(each, "SUCCESS")
    # If it is slow to acknowledge the copy, Redis delivers another one.
    eventually(lambda: received(stage, result.id) >= 2)
    eventually(lambda: drops(stage, result.id) >= 1)
    assert len(stage.begins(tag)) == 1
    narrow.kill()


@pytest.mark.parametrize("stage", ["solo"], indirect=True)
def test_early_acknowledged_task_of_a_solo_worker_longer_than_the_visibility_timeout_runs_once(
    stage, tag
):
    """Celery sends that acknowledgement after the body: the copy is in the queue by then."""
    queue = "solo"
    alone = stage.start_worker(queues=[queue], args=["--prefetch-multiplier", "1"])
    result = stage.call("hold", tag, queue=queue)
    stage.wait_for_begin(tag)
    with looking_for_lost_messages(stage.app):
        eventually(lambda: stage.props.redis.llen(queue) == 1, message="not redelivered")
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    eventually(lambda: drops(stage, result.id) >= 1)
    assert len(stage.begins(tag)) == 1
    stage.assert_only_a_mark_left(result)
    # Of a message that was there once nothing is left.
    other = stage.call("quick", tag, queue=queue)
    stage.end_of(other, "SUCCESS")
    stage.assert_nothing_left(other)
    alone.kill()
