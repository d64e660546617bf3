"""A message that RabbitMQ passes to a dead letter exchange, and that comes back from there.

A common way to try again later: a queue whose messages expire after a while, and go from there
to the queue of the worker. A rejected message is not a finished task, so that it must run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import celery
import pytest
from kombu import Connection, Queue

from tests.support import RabbitMQServer, eventually
from tests.support.stage import Stage

pytestmark = pytest.mark.versions

#: The name of the queue in which rejected messages wait.
LATER = "later"
WAITS_MS = 1000


@pytest.fixture
def stage_with_dead_letters(
    own_stage: Callable[..., Stage], rabbitmq_server: RabbitMQServer
) -> Callable[..., Stage]:
    def make(**options: Any) -> Stage:
        url = rabbitmq_server.fresh_url()
        to_later = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": LATER}
        queue = {"exchange": "celery", "routing_key": "celery", "queue_arguments": to_later}
        stage = own_stage(broker=url, task_queues={"celery": queue}, **options)
        and_back = {
            "x-message-ttl": WAITS_MS,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "celery",
        }
        with Connection(url) as connection:
            Queue(LATER, queue_arguments=and_back)(connection.default_channel).declare()
        return stage

    return make


def _deliver_and_take_back(stage: Stage, messages: int) -> None:
    """As a worker does with what it has fetched and not begun when it stops: from here on
    RabbitMQ says that they were delivered before."""
    with stage.app.connection_for_read() as connection:
        channel = connection.default_channel
        fetched = [channel.basic_get("celery") for _ in range(messages)]
        for message in fetched:
            channel.basic_reject(message.delivery_tag, requeue=True)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_dead_letter_that_was_delivered_before_runs_when_it_comes_back(
    stage_with_dead_letters, tag, pool
):
    stage = stage_with_dead_letters(pool=pool)
    tasks = ("reject_once", "reject_once_in_window", "fail_once_and_dead_letter")
    results = {task: stage.call(task, f"{task}-{tag}") for task in tasks}
    _deliver_and_take_back(stage, len(tasks))

    stage.start_worker()

    for task, result in results.items():
        stage.wait_for_result(result, "SUCCESS", f"{task}-{tag}")
        assert stage.props.runs(f"{task}-{tag}") == 2
        assert "already ended" not in stage.log()


#: In the log of a pool that has read a torn reply as it stopped, which happens before Celery 5.7:
#: its worker does not learn of the end, and the message comes back to the queue unacknowledged.
TORN_REPLY = "UnpicklingError"
RUN_LEASE_S = 10


def test_a_task_that_is_rejected_while_its_worker_stops_runs_when_it_comes_back(
    stage_with_dead_letters, tag
):
    stage = stage_with_dead_letters(unique_run_lease=RUN_LEASE_S)
    stage.start_worker()
    result = stage.call("reject_when_told", tag)
    stage.wait_for_run(tag)
    stage.worker.send_signal(signal.SIGTERM)
    stage.worker.wait_for_log("Warm shutdown")
    stage.props.let_go(tag)
    eventually(lambda: not stage.worker.is_running(), timeout=90)

    is_reported = TORN_REPLY not in stage.worker.log()
    assert is_reported or celery.VERSION[:2] < (5, 7)
    if is_reported:
        stage.wait_until_free("reject_when_told", tag)  # a rejected task holds no key
    # Its key may be another's by the time it comes back: it runs all the same.
    other = stage.call("reject_when_told", tag)
    began = time.monotonic()
    stage.start_worker()

    for each in (result, other):
        stage.wait_for_result(each, "SUCCESS", tag)
    stage.wait_until_free("reject_when_told", tag)
    took_s = time.monotonic() - began
    assert stage.props.runs(tag) == 3
    if is_reported:
        [lost] = [told for told in stage.props.told(result.id) if told["signal"] == "unique_lost"]
        assert "had lapsed" in lost["reason"]
    else:  # the process that ran it has freed the key, and its message found the record of that
        stage.assert_released(result, "discarded", "completed")
        assert took_s < RUN_LEASE_S


def test_a_message_that_expired_in_its_queue_runs_once_in_the_next(own_stage, rabbitmq_server, tag):
    """No worker has seen it: its key is held meanwhile, as that of any message that waits. (Of
    messages that expire RabbitMQ drops those that would come to the same queue again.)"""
    to_spare = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "spare"}
    queues = {
        name: {"exchange": name, "routing_key": name, "queue_arguments": arguments}
        for name, arguments in (("celery", to_spare), ("spare", {}))
    }
    stage = own_stage(broker=rabbitmq_server.fresh_url(), task_queues=queues)
    with Connection(stage.settings["broker"]) as connection:
        spare = Queue("spare")(connection.default_channel)
        spare.queue_declare()
        result = stage.call("succeed", tag, queue="celery", expiration=0.01)
        eventually(lambda: spare.queue_declare(passive=True).message_count == 1)
    assert stage.duplicate("succeed", tag).id == result.id

    stage.start_worker()

    stage.wait_for_result(result, "SUCCESS", tag)
    stage.assert_nothing_left(result)
    assert stage.props.runs(tag) == 1
    stage.assert_released(result, "completed")
