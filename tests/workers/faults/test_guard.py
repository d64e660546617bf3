"""A guarded task whose message is delivered twice: while it runs, after its end, after a kill."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from celery import Celery, uuid

from celery_unique.config.app_state import state_of
from celery_unique.keys.digest import guard_key
from tests.support import Worker, eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options
from tests.workers.faults.test_redelivery import (
    drops,
    looking_for_lost_messages,
    queued,
    received,
    waits_in,
)

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0
SLACK_S = 10.0


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent", "solo"])
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
    for worker in stage.workers:
        worker.kill()


@pytest.fixture
def workers(stage: Stage) -> list[Worker]:
    missing = 2 - sum(worker.is_running() for worker in stage.workers)
    stage.wait_until_ready(*[stage.start_worker(wait=False) for _ in range(missing)])
    return [worker for worker in stage.workers if worker.is_running()][-2:]


@pytest.fixture
def caller(stage: Stage) -> Iterator[Celery]:
    """A producer without the library."""
    app = Celery("caller", broker=stage.app.conf.broker_url, set_as_current=False)
    yield app
    app.close()


def mark_of(stage: Stage, task_id: str) -> str:
    mark = state_of(stage.app).store.mark(guard_key(task_id), task_id)
    return mark.kind if mark is not None else ""


def send(caller: Celery, task: str, tag: str, **options: object) -> str:
    task_id = uuid()
    caller.send_task(task, (tag,), task_id=task_id, **options)
    return task_id


def test_a_message_that_is_redelivered_while_its_task_runs_does_not_run_beside_it(
    stage, workers, caller, tag
):
    task_id = send(caller, "guarded_late", tag)
    stage.wait_for_begin(tag)
    eventually(lambda: any(waits_in(worker, task_id) for worker in workers))
    time.sleep(RUN_LEASE_S)  # the lease is renewed
    stage.props.let_go(tag)

    stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    eventually(lambda: drops(stage, task_id) > 0)
    eventually(lambda: queued(stage) == 0)
    assert len(stage.begins(tag)) == 1
    assert [end["still_mine"] for end in stage.ends(tag)] == [True]
    assert stage.signals(task_id, "unique_lost") == []
    assert mark_of(stage, task_id) == "done"


@pytest.mark.parametrize("task", ["guarded", "guarded_late"])
def test_a_copy_that_comes_after_the_end_does_not_run(stage, workers, caller, tag, task):
    task_id = send(caller, task, tag)
    stage.wait_for_begin(tag)
    stage.props.let_go(tag)
    stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    eventually(lambda: mark_of(stage, task_id) == "done")

    caller.send_task(task, (tag,), task_id=task_id)

    eventually(lambda: drops(stage, task_id) > 0)
    assert len(stage.begins(tag)) == 1


def test_an_eta_beyond_the_visibility_timeout_runs_once(stage, workers, caller, tag):
    task_id = send(caller, "guarded_quick", tag, countdown=4)

    eventually(lambda: received(stage, task_id) >= 2, message="not redelivered")
    stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    eventually(lambda: queued(stage) == 0, message="messages are left")
    assert len(stage.begins(tag)) == 1
    assert stage.signals(task_id, "unique_lost") == []


def test_after_a_sigkill_the_redelivered_message_runs(stage, workers, caller, tag):
    task_id = send(caller, "guarded_first", tag)
    first_run = stage.wait_for_begin(tag)
    [first] = [worker for worker in workers if worker.hostname == first_run["worker"]]

    first.kill()
    killed_at = time.time()

    again = stage.wait_for_begin(tag, 2)
    print(f"ran again {again['at'] - killed_at:.2f} s after SIGKILL")
    assert again["at"] - killed_at < 2 * RUN_LEASE_S + SLACK_S
    assert again["token"] > first_run["token"]
    stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    eventually(lambda: mark_of(stage, task_id) == "done")
    assert len(stage.begins(tag)) == 2


def test_a_task_of_rabbitmq_that_started_without_the_store_is_guarded_once_it_is_back(
    make_stage, rabbitmq_server, start_proxy, redis_server, tag
):
    url = rabbitmq_server.fresh_url()
    stage = make_stage(broker=url, unique_run_lease=RUN_LEASE_S, breaker_s=0.5)
    proxy = start_proxy(redis_server.port)
    store = proxy.url_of(stage.app.conf.unique_store_url)
    away = {"unique_store_url": store, "unique_gate_timeout": 0.25}
    worker = stage.start_worker(concurrency=2, settings=away)
    proxy.cut()
    result = stage.app.tasks["guarded_late"].delay(tag)
    stage.wait_for_begin(tag)
    proxy.restore()
    eventually(lambda: state_of(stage.app).store.read(guard_key(result.id))[0].tasks)

    stage.app.send_task("guarded_late", (tag,), task_id=result.id)
    eventually(lambda: waits_in(worker, result.id))
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    eventually(lambda: drops(stage, result.id) == 1)
    assert len(stage.begins(tag)) == 1
    assert stage.signals(result.id, "unique_lost") == []


def test_a_task_whose_connection_to_rabbitmq_broke_runs_once(
    make_stage, rabbitmq_server, start_proxy, tag
):
    url = rabbitmq_server.fresh_url()
    proxy = start_proxy(rabbitmq_server.port)
    stage = make_stage(broker=url, unique_run_lease=RUN_LEASE_S)
    worker = stage.start_worker(settings={"broker": proxy.url_of(url)})
    result = stage.app.tasks["guarded_late"].delay(tag)
    stage.wait_for_begin(tag)

    proxy.cut()
    worker.wait_for_log("Connection to broker lost")
    proxy.restore()
    eventually(lambda: waits_in(worker, result.id), timeout=20)
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    eventually(lambda: drops(stage, result.id) == 1)
    assert len(stage.begins(tag)) == 1
    assert re.search(r"held back \S+ .*until", worker.log())


@pytest.mark.parametrize("task", ["guarded_first", "hold_first"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_restarted_worker_ends_the_delivery_lease_of_its_dead_predecessor(
    make_stage, tag, pool, task
):
    """The lease of a minute is not waited for: the process that it believes alive is gone."""
    stage = make_stage(
        pool=pool, unique_run_lease=60, broker_transport_options=redis_broker_options(1)
    )
    name = f"restarted{tag}"
    first = stage.start_worker(name=name)
    result = stage.send(task, tag)
    first_run = stage.wait_for_begin(tag)
    first.kill()
    killed_at = time.time()

    second = stage.start_worker(name=name)
    again = stage.wait_for_begin(tag, 2)

    print(f"ran again {again['at'] - killed_at:.2f} s after SIGKILL, with a lease of 60 s")
    assert second.hostname == first.hostname == again["worker"]
    assert again["at"] - killed_at < 30
    assert again["token"] > first_run["token"]
    stage.end_of(result, "SUCCESS")
    held = rf"held back {task}\[{result.id}\]: .* until its end in worker {first.hostname}, or \S+"
    assert re.search(held, second.log())
    ended = f"ended the delivery lease of {task}[{result.id}]: process {first.pid} of worker"
    assert ended in second.log()
    second.kill()


def test_a_worker_whose_predecessor_lives_waits_for_it(make_stage, tag):
    """Two workers of one name, as an operator should not start them: nothing proves a death."""
    stage = make_stage(unique_run_lease=60, broker_transport_options=redis_broker_options(1))
    workers = [stage.start_worker(name=f"twins{tag}") for _ in range(2)]
    task_id = stage.send("guarded_late", tag).id
    stage.wait_for_begin(tag)
    eventually(lambda: any(waits_in(worker, task_id) for worker in workers))
    time.sleep(2)

    assert len(stage.begins(tag)) == 1
    assert "ended the delivery lease" not in stage.log()
    stage.props.let_go(tag)
    stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    for worker in workers:
        worker.kill()
