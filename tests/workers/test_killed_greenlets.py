"""A pool of greenlets ends its tasks from outside, too, and in ways of its own."""

from __future__ import annotations

from collections.abc import Callable

import celery
import pytest

from tests.support.stage import Stage

pytestmark = pytest.mark.versions

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def shared_stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(pool="gevent")


@pytest.mark.parametrize("task", ["hard_limit", "hard_limit_late"])
def test_the_time_limit_frees_the_key(stage, tag, task):
    first = stage.call(task, tag)

    stage.end_of(first, "FAILURE")

    stage.wait_until_free(task, tag)
    stage.assert_released(first, "discarded")
    stage.assert_nothing_left(first)


@pytest.mark.skipif(CELERY < (5, 7), reason="there the message is neither acked nor requeued")
def test_the_time_limit_keeps_the_key_of_a_task_that_is_requeued(stage, tag):
    first = stage.call("hard_limit_requeued", tag)
    stage.wait_for_run(tag)

    while stage.props.runs(tag) < 2:
        assert stage.duplicate("hard_limit_requeued", tag).id == first.id
    stage.props.let_go(tag, run=2)

    stage.wait_for_result(first, "SUCCESS")
    stage.wait_until_free("hard_limit_requeued", tag)
    stage.assert_released(first, "completed")


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_terminated_task_frees_the_key(stage, tag, task):
    first = stage.call(task, tag)
    stage.wait_for_run(tag)

    stage.app.control.revoke(first.id, terminate=True)

    stage.wait_for_result(first, "REVOKED")
    stage.wait_until_free(task, tag)
    second = stage.call(task, tag)
    stage.props.let_go(tag, run=2)
    stage.end_of(second, "SUCCESS")
