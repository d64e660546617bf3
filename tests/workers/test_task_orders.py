"""Retry, replace, Reject: a task that tells Celery what becomes of it."""

from __future__ import annotations

import pytest

from tests.support.stage import Stage

# -- retries -------------------------------------------------------------------------


def test_an_automatic_retry_keeps_the_key(stage, tag):
    first = stage.call("retry_by_itself", tag)
    stage.wait_for_state("retry_by_itself", tag, state="retryable")

    assert stage.duplicate("retry_by_itself", tag).id == first.id

    stage.deliver_retry()
    stage.wait_for_result(first, "SUCCESS")
    stage.assert_nothing_left(first)
    assert stage.props.runs(tag) == 2
    stage.assert_released(first, "completed")


#: Sentry and Datadog send it: Celery then takes a request's headers from it alone.
NESTED = {"headers": {"sentry-trace": "1"}, "tenant": "a"}


@pytest.mark.parametrize(
    ("task", "headers"),
    [
        ("retry_once", NESTED),
        ("retry_once_late", NESTED),
        ("retry_by_itself", NESTED),
        ("retry_quietly", NESTED),
        ("retry_with_headers", NESTED),
        ("retry_with_headers", {}),
    ],
)
def test_a_retry_keeps_the_key_whatever_becomes_of_its_other_headers(stage, tag, task, headers):
    first = stage.call(task, tag, headers=headers)
    stage.wait_for_state(task, tag, state="retryable")

    assert stage.duplicate(task, tag).id == first.id

    stage.deliver_retry()
    stage.wait_for_run(tag, 2)
    stage.wait_until_free(task, tag)
    stage.assert_released(first, "completed")


def test_a_header_of_the_running_task_is_inherited_beside_one_named_headers(stage, tag):
    plain = stage.app.tasks["call_for_tenant"].apply_async((tag,), headers={"tenant": "a"})
    traced = stage.app.tasks["call_for_tenant"].apply_async((tag,), headers=NESTED)
    other = stage.app.tasks["call_for_tenant"].apply_async(
        (tag,), headers={**NESTED, "tenant": "b"}
    )

    assert stage.end_of(plain, "SUCCESS") == stage.end_of(traced, "SUCCESS")
    assert stage.end_of(other, "SUCCESS") != stage.end_of(plain, "SUCCESS")


@pytest.mark.parametrize(
    ("task", "state"), [("retry_quietly", "SUCCESS"), ("retry_quietly_and_fail", "FAILURE")]
)
def test_a_retry_that_does_not_raise_keeps_the_key_for_the_retry(stage, tag, task, state):
    first = stage.call(task, tag)
    stage.wait_for_result(first, state)

    assert stage.duplicate(task, tag).id == first.id

    stage.deliver_retry()
    stage.wait_for_run(tag, 2)
    stage.wait_until_free(task, tag)
    stage.assert_nothing_left(first)
    stage.assert_released(first, "completed")


def test_a_retry_that_could_not_be_published_gives_the_key_back(stage, tag):
    first = stage.call("retry_unpublishable", tag)
    stage.wait_for_run(tag)

    stage.wait_until_free("retry_unpublishable", tag)

    stage.assert_nothing_left(first)
    stage.assert_released(first, "discarded")
    stage.call("retry_unpublishable", tag)


# -- replacements ----------------------------------------------------------------------


def test_a_replacement_that_is_not_unique_inherits_the_lock(stage, tag):
    first = stage.call("replace", tag, "plain")
    stage.wait_for_run(f"plain-{tag}")

    assert stage.duplicate("replace", tag, "plain").id == first.id

    stage.props.let_go(f"plain-{tag}")
    assert stage.end_of(first, "SUCCESS") == tag
    assert stage.lock("replace", tag, "plain") is None
    stage.assert_nothing_left(first)
    stage.assert_released(first, "completed")


def test_a_replacement_with_a_key_of_its_own_takes_that_in_exchange(stage, tag):
    first = stage.call("replace", tag, "unique")
    stage.wait_for_run(f"other-{tag}")

    stage.wait_until_free("replace", tag, "unique")
    lock = stage.lock("other", tag)
    assert lock is not None
    assert (lock.task_id, lock.task_name) == (first.id, "other")

    stage.props.let_go(f"other-{tag}")
    assert stage.end_of(first, "SUCCESS") == f"other {tag}"
    assert stage.lock("other", tag) is None
    stage.assert_nothing_left(first)


def test_a_task_replaced_by_itself_keeps_its_key(stage, tag):
    first = stage.call("replace", tag, "itself")
    stage.wait_for_run(tag, 2)

    assert stage.duplicate("replace", tag, "itself").id == first.id

    stage.props.let_go(tag)
    assert stage.end_of(first, "SUCCESS") == f"itself {tag}"
    assert stage.lock("replace", tag, "itself") is None
    stage.assert_nothing_left(first)


def test_a_replacement_by_a_chain_gives_the_key_back_when_the_chain_is_sent(stage, tag):
    """The id goes on in the chain's last task, which is not published yet: nobody is
    left who could hold the key, so the next call is admitted beside the chain."""
    first = stage.call("replace", tag, "chain")
    stage.wait_for_run(f"plain-{tag}")  # the chain's last task, which has the first one's id

    stage.wait_until_free("replace", tag, "chain")

    stage.assert_nothing_left(first)
    stage.props.let_go(f"plain-{tag}")
    assert stage.end_of(first, "SUCCESS") == tag


def test_a_replacement_by_one_of_celerys_own_tasks_gives_the_key_back(stage, tag):
    first = stage.call("replace", tag, "map")

    assert stage.end_of(first, "SUCCESS") == [f"mapped-{tag}"]

    # That is the end of Celery's task, which may run before the body that sent it is over.
    stage.wait_until_free("replace", tag, "map")
    stage.assert_nothing_left(first)


def test_a_replacement_that_could_not_be_published_gives_the_key_back(stage, tag):
    first = stage.call("replace", tag, "unpublishable")

    stage.end_of(first, "FAILURE")

    assert stage.lock("replace", tag, "unpublishable") is None
    stage.assert_nothing_left(first)


# -- Reject ----------------------------------------------------------------------------


@pytest.mark.versions
def test_a_rejected_task_gives_its_key_back(stage, tag):
    first = stage.call("reject", tag)

    stage.wait_until_free("reject", tag)

    stage.assert_nothing_left(first)
    stage.assert_released(first, "discarded")
    second = stage.call("reject", tag)
    stage.assert_nothing_left(second)


@pytest.mark.versions
@pytest.mark.parametrize("requeue", [False, True])
def test_rejecting_a_message_that_is_acknowledged_ends_the_task(stage, tag, requeue):
    first = stage.call("reject_early", tag, requeue)
    stage.wait_for_run(tag)

    stage.wait_until_free("reject_early", tag, requeue)

    stage.assert_nothing_left(first)
    stage.call("reject_early", tag, requeue)
    stage.wait_for_run(tag, 2)


@pytest.mark.versions
def test_a_failure_that_rejects_its_message_leaves_nothing(stage, tag):
    """Late acknowledged, and acks_on_failure_or_timeout off: for a dead letter queue."""
    first = stage.call("fail_late_and_dead_letter", tag)
    stage.end_of(first, "FAILURE")

    stage.assert_nothing_left(first)

    stage.assert_released(first, "discarded")


@pytest.mark.versions
def test_a_requeued_task_keeps_its_key(stage, tag):
    _requeue(stage, tag)


@pytest.mark.versions
def test_a_requeued_task_keeps_its_key_on_rabbitmq(own_stage, rabbitmq_server, tag):
    stage = own_stage(broker=rabbitmq_server.fresh_url())
    stage.start_worker()

    _requeue(stage, tag)


def _requeue(stage: Stage, tag: str) -> None:
    first = stage.call("requeue_once", tag)
    stage.wait_for_run(tag, 2)

    again = stage.duplicate("requeue_once", tag)

    assert (again.id, again.holder_state) == (first.id, "active")
    stage.props.let_go(tag)
    assert stage.end_of(first, "SUCCESS") == tag
    stage.wait_until_free("requeue_once", tag)
    stage.assert_only_a_mark_left(first)
    stage.assert_released(first, "completed")


def test_a_redelivered_task_that_celery_skips_gives_its_key_back(own_stage, tag):
    """Its success is stored, so that Celery acknowledges it without running its body."""
    stage = own_stage(worker_deduplicate_successful_tasks=True)
    stage.start_worker()
    first = stage.call("succeed_and_requeue", tag)

    stage.end_of(first, "SUCCESS")

    stage.wait_until_free("succeed_and_requeue", tag)
    assert stage.props.runs(tag) == 1
    stage.assert_released(first, "completed")
    stage.assert_only_a_mark_left(first)


# -- a result that cannot be stored ------------------------------------------------------


def test_a_success_whose_result_cannot_be_stored_does_not_count_as_success(stage, tag):
    """Success would keep the key, failure frees it, and the task did fail in the end."""
    first = stage.call("return_object_once", tag)

    stage.end_of(first, "FAILURE")

    stage.wait_until_free("return_object_once", tag)
    stage.assert_nothing_left(first)


@pytest.mark.parametrize("task", ["succeed", "hold_late"])
def test_a_task_before_which_celery_itself_fails_gives_its_key_back(stage, tag, task):
    first = stage.call(task, f"broken-{tag}")

    stage.end_of(first, "FAILURE")

    stage.wait_until_free(task, f"broken-{tag}")
    stage.assert_released(first, "discarded")
    stage.assert_nothing_left(first)
