"""RabbitMQ takes a message away, or takes none: limits of deliveries, of time and of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import RabbitMQServer, eventually
from tests.support.stage import Stage

pytestmark = pytest.mark.slow

RUN_LEASE_S = 2


@pytest.fixture
def make_rabbitmq_stage(
    own_stage: Callable[..., Stage], rabbitmq_server: RabbitMQServer
) -> Callable[..., Stage]:
    def make(**settings: Any) -> Stage:
        url = rabbitmq_server.fresh_url()
        return own_stage(broker=url, unique_run_lease=RUN_LEASE_S, **settings)

    return make


# -- a delivery limit ------------------------------------------------------------------------------


def test_a_message_beyond_its_delivery_limit_runs_from_the_dead_letter_queue(
    make_rabbitmq_stage, tag
):
    to_spare = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "spare"}
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 0, **to_spare}
    queues = {
        name: {"exchange": name, "routing_key": name, "queue_arguments": arguments}
        for name, arguments in (("celery", limited), ("spare", {}))
    }
    stage = make_rabbitmq_stage(task_queues=queues, task_default_queue="celery")
    stage.start_worker()
    first = stage.call("requeue_once", tag)

    stage.wait_for_run(tag, 2)
    assert stage.duplicate("requeue_once", tag).id == first.id
    stage.props.let_go(tag)

    stage.wait_for_result(first, "SUCCESS", tag)
    stage.wait_until_free("requeue_once", tag)
    assert stage.props.runs(tag) == 2


# -- consumer_timeout ------------------------------------------------------------------------------


@contextmanager
def consumer_timeout(server: RabbitMQServer) -> Iterator[None]:
    """The shortest: the broker looks once in a tick whether a message is held for longer."""

    def put(timeout_ms: int, tick_ms: int) -> None:
        statement = "application:set_env(rabbit, {}, {})"
        values = {"consumer_timeout": timeout_ms, "channel_tick_interval": tick_ms}
        server.control("eval", ",".join(statement.format(*pair) for pair in values.items()) + ".")

    put(1000, 1000)
    try:
        yield
    finally:
        put(1_800_000, 60_000)


def test_a_task_beyond_the_consumer_timeout_runs_once(make_rabbitmq_stage, rabbitmq_server, tag):
    """RabbitMQ closes the channel of a worker that does not acknowledge in time. Celery does not
    recover from that: the worker stops, which waits for its tasks, and another one has the
    message meanwhile."""
    stage = make_rabbitmq_stage()
    with consumer_timeout(rabbitmq_server):
        first_worker = stage.start_worker()
        first = stage.call("hold_late", tag)
        stage.wait_for_run(tag)
        first_worker.wait_for_log("PRECONDITION_FAILED", 60)

    other = stage.start_worker()
    other.wait_for_log(rf"{first.id}\]: another delivery or its predecessor is running", 60)
    assert stage.duplicate("hold_late", tag).id == first.id
    stage.props.let_go(tag)

    stage.wait_for_result(first, "SUCCESS", tag)
    other.wait_for_log(rf"dropped \S+\[{first.id}\]: it has already finished", 60)
    stage.wait_until_free("hold_late", tag)
    assert stage.props.runs(tag) == 1
    eventually(lambda: not first_worker.is_running(), timeout=60, message="it did not end")


# -- a blocked connection --------------------------------------------------------------------------


@contextmanager
def memory_alarm(server: RabbitMQServer) -> Iterator[None]:
    """RabbitMQ takes no messages from connections that publish until the alarm is over."""
    alarm = "{resource_limit, memory, node()}"
    server.control("eval", f"rabbit_alarm:set_alarm({{{alarm}, []}}).")
    try:
        yield
    finally:
        server.control("eval", f"rabbit_alarm:clear_alarm({alarm}).")


def test_a_call_on_a_blocked_connection_holds_its_key_and_runs_once_when_it_is_over(
    make_rabbitmq_stage, rabbitmq_server, tag
):
    stage = make_rabbitmq_stage()
    stage.start_worker()
    with memory_alarm(rabbitmq_server):
        first = stage.call("succeed", tag)

        assert stage.duplicate("succeed", tag).id == first.id
        assert stage.props.runs(tag) == 0

    stage.wait_for_result(first, "SUCCESS", tag)
    stage.wait_until_free("succeed", tag)
    assert stage.props.runs(tag) == 1
