"""However a task ends by itself, on every pool: its key is free when the result is seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from celery_unique.stores.redis.store import RedisStore
from tests.support import eventually
from tests.support.stage import Stage

#: A store that writes the result records what is stored, any other what the body returned.
UNSERIALISABLE = "discarded" if hasattr(RedisStore, "finish_with_result") else "completed"


@pytest.fixture(scope="module", params=["prefork", "threads", "solo", "gevent"])
def shared_stage(
    request: pytest.FixtureRequest, make_stage: Callable[..., Stage]
) -> Iterator[Stage]:
    stage = make_stage(pool=request.param)
    yield stage
    stage.close()


@pytest.mark.parametrize(
    ("task", "state", "reason"),
    [
        ("succeed", "SUCCESS", "completed"),
        ("fail", "FAILURE", "discarded"),
        ("retry_in_vain", "FAILURE", "discarded"),
        ("return_object", "FAILURE", UNSERIALISABLE),
    ],
)
def test_the_key_is_free_as_soon_as_the_result_is_seen(stage, tag, task, state, reason):
    first = stage.call(task, tag)

    stage.end_of(first, state)

    assert stage.lock(task, tag) is None
    second = stage.call(task, tag)
    stage.end_of(second, state)
    assert second.id != first.id
    stage.assert_released(first, reason)
    stage.assert_nothing_left(second)


@pytest.mark.parametrize(("task", "state"), [("hold_late", "SUCCESS"), ("fail_late", "FAILURE")])
def test_a_late_acknowledged_task_keeps_nothing_after_its_acknowledgement(stage, tag, task, state):
    first = stage.call(task, tag)
    stage.props.let_go(tag)
    stage.end_of(first, state)

    second = stage.call(task, tag)  # at once, although the first may not be acknowledged yet

    stage.props.let_go(tag, run=2)
    stage.end_of(second, state)
    stage.assert_nothing_left(second)
    assert stage.props.runs(tag) == 2


def test_a_running_task_holds_its_key(stage, tag):
    first = stage.call("hold", tag)
    stage.wait_for_run(tag)

    again = stage.duplicate("hold", tag)

    assert (again.id, again.holder_state) == (first.id, "active")
    lock = stage.lock("hold", tag)
    assert lock is not None
    assert (lock.task_id, lock.duplicates, lock.worker) == (
        first.id,
        1,
        stage.worker.hostname,
    )
    stage.props.let_go(tag)
    assert stage.end_of(first, "SUCCESS") == tag
    stage.assert_nothing_left(first)
    assert stage.props.runs(tag) == 1


@pytest.mark.parametrize("task", ["retry_once", "retry_once_late"])
def test_a_retry_keeps_the_key_until_its_own_end(stage, tag, task):
    first = stage.call(task, tag, 1)
    lock = stage.wait_for_state(task, tag, 1, state="retryable")

    again = stage.duplicate(task, tag, 1)

    assert lock.task_id == again.id == first.id
    assert again.holder_state == "retryable"
    stage.deliver_retry()
    stage.wait_for_result(first, "SUCCESS", 1)  # retried once
    assert stage.props.runs(tag) == 2
    stage.wait_until_free(task, tag, 1)
    stage.assert_released(first, "completed")


def test_a_retry_without_delay_is_not_kept_waiting(stage, tag):
    """A delivery that waits for a long task sleeps a second before it asks again. Every retry
    that arrives before its sender has ended would take that long; a busy machine makes only
    some of them slow."""
    took = []
    for attempt in range(10):
        began = time.monotonic()
        first = stage.call("retry_and_linger", f"{tag}-{attempt}")
        eventually(lambda first=first: first.state == "SUCCESS", interval=0.005)
        took.append(time.monotonic() - began)
        stage.assert_nothing_left(first)
        if took[-1] < 0.9:
            return
    pytest.fail(f"each of ten retries was kept waiting: {took}")


def test_an_ignored_task_gives_its_key_back(stage, tag):
    first = stage.call("ignore", tag)

    stage.wait_until_free("ignore", tag)

    assert first.state == "PENDING"  # Celery stores nothing
    stage.assert_nothing_left(first)
    stage.assert_released(first, "cancelled")
    stage.call("ignore", tag)


@pytest.mark.parametrize("pattern", ["tuple", "numbers as keys"])
def test_arguments_that_the_wire_changes_are_the_key_of_the_call(stage, tag, pattern):
    items = ("a", ("b",)) if pattern == "tuple" else ["a"]
    options = {1: "one", 2: {3: "three"}} if pattern == "numbers as keys" else {}
    first = stage.call("mutate", tag, items, options)

    assert stage.end_of(first, "SUCCESS") == len(items) + 1

    assert stage.lock("mutate", tag, items, options) is None
    stage.assert_nothing_left(first)
    stage.end_of(stage.call("mutate", tag, items, options), "SUCCESS")


def test_the_key_is_held_until_a_call_of_the_tasks_own_class_ends(stage, tag):
    first = stage.call("own_call", tag)
    stage.wait_for_run(f"after-{tag}")  # run() is over, __call__() is not

    again = stage.duplicate("own_call", tag)

    assert again.id == first.id
    stage.props.let_go(tag)
    assert stage.end_of(first, "SUCCESS") == tag
    assert stage.lock("own_call", tag) is None
    stage.assert_nothing_left(first)
    stage.assert_released(first, "completed")


def test_a_direct_call_takes_no_lock_and_frees_none(stage, tag):
    first = stage.call("call_directly", tag)
    stage.wait_for_run(tag)
    eventually(lambda: stage.props.runs(f"inner-{tag}") == 2)

    assert stage.lock("succeed", f"inner-{tag}") is None
    assert stage.duplicate("call_directly", tag).id == first.id

    stage.props.let_go(tag)
    stage.end_of(first, "SUCCESS")
    stage.assert_nothing_left(first)
    assert stage.app.tasks["succeed"](tag) == tag  # here, in the test
    assert stage.lock("succeed", tag) is None


@pytest.mark.parametrize("how", ["fail", "ignore", "reject"])
@pytest.mark.parametrize("task", ["stopped_before", "stopped_before_late"])
def test_a_task_that_ends_before_its_body_gives_its_key_back(stage, tag, task, how):
    first = stage.call(task, tag, how)

    stage.wait_until_free(task, tag, how)

    stage.assert_nothing_left(first)
    second = stage.call(task, tag, how)
    assert stage.end_of(second, "SUCCESS") == tag
    stage.assert_nothing_left(second)


@pytest.mark.parametrize("task", ["stopped_before", "stopped_before_late"])
def test_a_retry_before_the_body_keeps_the_key(stage, tag, task):
    first = stage.call(task, tag, "retry")

    lock = stage.wait_for_state(task, tag, "retry", state="retryable")

    assert lock.task_id == first.id
    assert stage.duplicate(task, tag, "retry").id == first.id
    stage.deliver_retry()
    stage.wait_for_result(first, "SUCCESS")
    stage.wait_until_free(task, tag, "retry")


@pytest.mark.versions
@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("task", ["leave", "leave_late"])
def test_a_task_that_leaves_its_process_gives_its_key_back(stage, tag, task, how):
    stage.call(task, tag, how)
    stage.wait_for_run(tag)
    call = stage.app.tasks[task].s(tag, how)

    second = eventually(lambda: (again := call.apply_async()).outcome == "created" and again)

    if stage.pool == "solo":  # the worker itself ends with such a task, in Celery's own code
        eventually(lambda: not stage.worker.is_running())
        stage.start_worker()
    assert stage.end_of(second, "SUCCESS") == tag
    if task == "leave":
        stage.assert_nothing_left(second)
