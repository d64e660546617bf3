"""Ends that the body does not see, or not as an ordinary exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import celery
import pytest

from tests.support.stage import Stage

pytestmark = pytest.mark.versions

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


# -- time limits -------------------------------------------------------------------------


def test_the_soft_time_limit_frees_the_key(stage, tag):
    first = stage.call("soft_limit", tag)

    stage.end_of(first, "FAILURE")

    assert stage.lock("soft_limit", tag) is None
    stage.assert_nothing_left(first)
    stage.assert_released(first, "discarded")


@pytest.mark.parametrize("task", ["hard_limit", "hard_limit_late"])
def test_the_hard_time_limit_frees_the_key(stage, tag, task):
    first = stage.call(task, tag)

    stage.end_of(first, "FAILURE")

    assert stage.lock(task, tag) is None
    stage.assert_released(first, "discarded")  # although Celery reports it twice
    # It may have been killed before its body began; and the next one is not to be killed as well.
    stage.props.let_go(tag, run=stage.props.runs(tag) + 1)
    second = stage.call(task, tag, time_limit=600)
    assert stage.end_of(second, "SUCCESS") == tag
    stage.assert_nothing_left(second)


def test_the_hard_time_limit_keeps_the_key_of_a_task_that_is_requeued(stage, tag):
    _is_requeued_after(stage, "hard_limit_requeued", tag, lambda pid: None)


# -- a killed child ----------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lose", "lose_late"])
def test_a_killed_child_frees_the_key(stage, tag, task):
    first = stage.call(task, tag)

    os.kill(stage.wait_for_run(tag), signal.SIGKILL)
    stage.end_of(first, "FAILURE")

    assert stage.lock(task, tag) is None
    stage.assert_released(first, "discarded")
    stage.props.let_go(tag, run=2)
    second = stage.call(task, tag)
    assert stage.end_of(second, "SUCCESS") == tag
    stage.assert_nothing_left(second)


def test_a_killed_child_keeps_the_key_of_a_task_that_is_requeued(stage, tag):
    _is_requeued_after(stage, "lose_requeued", tag, _kill)


def test_a_killed_child_keeps_the_key_of_a_task_that_is_requeued_on_rabbitmq(
    own_stage, rabbitmq_server, tag
):
    stage = own_stage(broker=rabbitmq_server.fresh_url())
    stage.start_worker()

    _is_requeued_after(stage, "lose_requeued", tag, _kill)


@pytest.mark.skipif(CELERY < (5, 7), reason="retry_on_worker_lost came with Celery 5.7")
@pytest.mark.parametrize("headers", [{}, {"headers": {"sentry-trace": "1"}}])
@pytest.mark.parametrize("task", ["lose_retried", "lose_late_retried"])
def test_a_killed_child_keeps_the_key_of_a_task_that_is_retried(stage, tag, task, headers):
    first = stage.call(task, tag, headers=headers)

    _kill(stage.wait_for_run(tag))

    stage.wait_for_state(task, tag, state="retryable")
    assert stage.duplicate(task, tag).id == first.id
    stage.deliver_retry()
    stage.wait_for_run(tag, 2)
    stage.props.let_go(tag, run=2)
    stage.wait_for_result(first, "SUCCESS")
    stage.wait_until_free(task, tag)
    stage.assert_released(first, "completed")


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _is_requeued_after(stage: Stage, task: str, tag: str, happens: Callable[[int], None]) -> None:
    first = stage.call(task, tag)
    happens(stage.wait_for_run(tag))

    # From the first run to the end of the second no other call is admitted.
    while stage.props.runs(tag) < 2:
        assert stage.duplicate(task, tag).id == first.id
    stage.props.let_go(tag, run=2)
    stage.wait_for_result(first, "SUCCESS")
    assert stage.props.runs(tag) == 2
    stage.wait_until_free(task, tag)
    stage.assert_only_a_mark_left(first)
    stage.assert_released(first, "completed")


# -- revoked while it runs --------------------------------------------------------------------


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_terminated_task_frees_the_key(stage, tag, task):
    first = stage.call(task, tag)
    stage.wait_for_run(tag)

    stage.app.control.revoke(first.id, terminate=True)
    stage.end_of(first, "REVOKED")

    stage.wait_until_free(task, tag)  # up to 5.6 it looks revoked before it is terminated
    stage.assert_released(first, "cancelled")
    second = stage.call(task, tag)
    stage.wait_for_run(tag, 2)
    stage.props.let_go(tag, run=2)
    stage.end_of(second, "SUCCESS")
    stage.wait_until_free(task, tag)


def test_a_revoke_without_terminate_leaves_a_running_task_alone(stage, tag):
    first = stage.call("hold", tag)
    stage.wait_for_run(tag)

    stage.app.control.revoke(first.id)
    stage.worker.wait_for_log(
        f"{first.id}.*flagged as revoked|Tasks flagged as revoked: {first.id}"
    )

    assert stage.duplicate("hold", tag).id == first.id
    stage.props.let_go(tag)
    stage.wait_for_result(first, "SUCCESS")  # up to 5.6 it has looked revoked meanwhile
    stage.wait_until_free("hold", tag)
