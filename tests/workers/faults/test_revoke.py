"""A revoked task frees its key at once and does not run; a task that is retried keeps it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
from celery import Celery

import celery_unique
from tests.support import eventually
from tests.support.stage import Stage, staged_app
from tests.workers.faults.caller import Caller

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0


@pytest.fixture(scope="module")
def shared_stage(make_stage: Callable[..., Stage]) -> Stage:
    stage = make_stage(unique_run_lease=RUN_LEASE_S)
    stage.start_worker()
    return stage


@pytest.fixture
def stage(shared_stage: Stage, tag: str) -> Stage:
    """The one slot of the worker is taken, so that everything else is received and waits."""
    shared_stage.call("hold", f"busy-{tag}")
    shared_stage.wait_for_begin(f"busy-{tag}")
    return shared_stage


def by_result(stage: Stage, result: object) -> None:
    result.revoke()


def by_the_same_process(stage: Stage, result: object) -> None:
    stage.app.control.revoke(result.id)


def by_another_process(stage: Stage, result: object) -> None:
    code = "import sys; from tests.workers.apps.staged import app; app.control.revoke(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, result.id],
        env=stage.env,
        check=True,
        timeout=60,
    )


def by_an_app_without_the_library(stage: Stage, result: object) -> None:
    plain = Celery(broker=stage.settings["broker"], set_as_current=False)
    plain.control.revoke(result.id)
    plain.close()


@pytest.mark.parametrize("revoke", [by_result, by_the_same_process, by_another_process])
@pytest.mark.parametrize("options", [{}, {"countdown": 60}], ids=["reserved", "eta"])
def test_revoke_of_a_waiting_task_frees_its_key_at_once(stage, tag, revoke, options):
    first = stage.call("quick", tag, **options)
    wait_until_received(stage, first.id)

    revoke(stage, first)

    assert stage.lock("quick", tag) is None
    second = stage.call("quick", tag)
    stage.props.let_go(f"busy-{tag}")
    stage.end_of(second, "SUCCESS")
    if not options:
        eventually(lambda: first.state == "REVOKED")
    assert [run["id"] for run in stage.begins(tag)] == [second.id]


@pytest.mark.parametrize("options", [{}, {"countdown": 60}], ids=["reserved", "eta"])
def test_revoke_by_an_app_without_the_library_frees_the_key_when_a_worker_hears_it(
    stage, tag, options
):
    first = stage.call("quick", tag, **options)
    wait_until_received(stage, first.id)

    by_an_app_without_the_library(stage, first)

    stage.wait_until_free("quick", tag)
    second = stage.call("quick", tag)
    stage.props.let_go(f"busy-{tag}")
    stage.end_of(second, "SUCCESS")
    assert [run["id"] for run in stage.begins(tag)] == [second.id]


@pytest.mark.parametrize("revoke", [by_result, by_the_same_process, by_another_process])
def test_task_that_was_revoked_in_the_broker_is_dropped_by_a_worker_that_never_heard_of_it(
    stage, tag, revoke
):
    stage.props.let_go(f"busy-{tag}")
    first = stage.call("quick", tag, queue=tag)
    revoke(stage, first)
    assert stage.lock("quick", tag) is None
    second = stage.call("quick", tag, queue=tag)

    late = stage.start_worker(queues=[tag])

    stage.end_of(second, "SUCCESS")
    eventually(lambda: stage.app.AsyncResult(first.id).state == "REVOKED")
    assert [run["id"] for run in stage.begins(tag)] == [second.id]
    late.kill()
    stage.workers.remove(late)


def test_tasks_that_others_have_published_are_found_one_after_another(stage, tag):
    """The walk for the first one's key says nothing of a task that came after it."""

    stage.props.let_go(f"busy-{tag}")
    other = staged_app(**stage.settings)
    for n in range(3):
        result = stage.call("quick", f"{tag}-{n}", queue="nobody")

        other.control.revoke(result.id)

        assert stage.lock("quick", f"{tag}-{n}") is None
    other.close()


def test_revoke_of_a_duplicate_revokes_the_shared_holder_and_says_so(stage, tag, caplog):
    first = stage.call("quick", tag)
    wait_until_received(stage, first.id)
    duplicate = stage.duplicate("quick", tag)

    with caplog.at_level(logging.WARNING, "celery_unique"):
        duplicate.revoke()

    assert caplog.messages == [
        f"revoking task {first.id}, which other calls share: this result is a duplicate"
    ]
    assert stage.lock("quick", tag) is None
    stage.props.let_go(f"busy-{tag}")
    eventually(lambda: first.state == "REVOKED")
    assert stage.begins(tag) == []


def test_revoke_of_a_running_task_leaves_its_lock_alone(stage, tag):
    running = stage.lock("hold", f"busy-{tag}")

    stage.app.control.revoke(running.task_id)

    assert stage.duplicate("hold", f"busy-{tag}").id == running.task_id
    stage.props.let_go(f"busy-{tag}")
    [end] = eventually(lambda: stage.ends(f"busy-{tag}"))
    assert end["still_mine"]
    stage.wait_until_free("hold", f"busy-{tag}")


def test_retry_keeps_the_key_for_longer_than_the_run_lease(stage, tag):
    stage.props.let_go(f"busy-{tag}")
    for countdown in (1.5 * RUN_LEASE_S, 6 * RUN_LEASE_S):
        each = f"{tag}-{countdown}"
        first = stage.call("retry_once", each, countdown)

        with Caller(stage, "retry_once", each, countdown) as caller:
            lock = look_before_the_retry(stage, each, countdown)
            again = stage.wait_for_begin(each, 2)
            caller.stop()
        if lock is not None:
            break

    assert lock is not None
    # The queue lease of a day, and the countdown on top.
    assert (lock.expires_at.timestamp() - lock.created_at.timestamp()) > 24 * 3600 + countdown
    assert (again["id"], again["retries"]) == (first.id, 1)
    while_it_waited = [answer for answer in caller.answers if answer.at < again["at"]]
    print(f"{len(while_it_waited)} calls while it waited, all duplicates")
    assert {answer.task_id for answer in while_it_waited} == {first.id}


def test_revoke_of_a_task_that_waits_for_its_retry_frees_the_key(stage, tag):
    stage.props.let_go(f"busy-{tag}")
    for countdown in (2, 8, 30):  # on a busy machine the retry may come before its revoke
        each = f"{tag}-{countdown}"
        first = stage.call("retry_once", each, countdown)
        look_before_the_retry(stage, each, countdown)

        first.revoke()

        if len(stage.begins(each)) == 1:
            break

    assert stage.lock("retry_once", each, countdown) is None
    eventually(lambda: first.state == "REVOKED", timeout=60)
    assert len(stage.begins(each)) == 1


def look_before_the_retry(stage: Stage, tag: str, countdown: float) -> celery_unique.Lock | None:
    """The lock of a task that waits for its retry; None where that was faster than a look."""

    def look() -> list[celery_unique.Lock | None]:
        lock = stage.lock("retry_once", tag, countdown)
        if lock is not None and lock.state == "retryable":
            return [lock]
        return [None] if len(stage.begins(tag)) > 1 else []

    return eventually(look)[0]


def wait_until_received(stage: Stage, task_id: str) -> None:
    stage.worker.wait_for_log(rf"\[{task_id}\] received")
