"""A worker is killed, or stops, with messages that it has fetched and not begun; on Redis, which
delivers them again an hour later."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import eventually
from tests.support.stage import Stage

pytestmark = pytest.mark.versions

RUN_LEASE_S = 2.0


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage(unique_run_lease=RUN_LEASE_S)


def is_held(stage: Stage, task: str, tag: str, task_id: str) -> bool:
    """Whether the store knows that a worker has the message."""
    return stage.record(task, tag).tasks[task_id].held_until > 0


def call_until_it_begins(stage: Stage, task: str, tag: str, number: int = 1) -> set[str]:
    """Every answer to the calls that were made for it."""
    answers = set()

    def begun() -> bool:
        if len(stage.begins(tag)) < number:
            answers.add(stage.duplicate(task, tag).id)
        return len(stage.begins(tag)) >= number

    # Far less than the hour after which Redis delivers a message again.
    eventually(begun, timeout=60, message=f"{task} of {tag} does not run")
    return answers


def deliver_again(stage: Stage) -> int:
    """What Redis does after the visibility timeout. How many messages there were."""
    unacked = int(stage.props.redis.hlen("unacked"))
    with stage.app.connection_for_read() as connection:
        channel = connection.default_channel
        channel.visibility_timeout = 0
        eventually(
            lambda: (
                channel.qos.restore_visible(num=100, interval=0)
                or stage.props.redis.hlen("unacked") < unacked
            )
        )
    return unacked


def drops(stage: Stage, result: Any) -> bool:
    return f"[{result.id}]: it has already finished" in stage.log()


def test_keys_of_what_a_killed_worker_had_not_begun_are_served_within_the_run_lease(stage, tag):
    worker = stage.start_worker(concurrency=2)
    running = stage.call("hold", f"rerun-{tag}")
    calling = stage.call("call_itself", f"self-{tag}")
    for each in ("rerun", "self"):
        stage.wait_for_begin(f"{each}-{tag}")
    rerun = stage.app.tasks["hold"].apply_async((f"rerun-{tag}",), unique_on_conflict="rerun")
    [called] = eventually(lambda: stage.props.notes(f"self-{tag}", "called"))
    # These hold their keys until their begin was seen: no call is made for one that has ended.
    prefetched = stage.call("hold", f"prefetched-{tag}")
    scheduled = stage.call("hold", f"scheduled-{tag}", countdown=3)
    linked = stage.call("quick", f"linked-{tag}", link=stage.app.tasks["first"].s())
    waiting = [
        ("hold", f"rerun-{tag}", rerun.id),
        ("call_itself", f"self-{tag}", called["id"]),
        ("hold", f"prefetched-{tag}", prefetched.id),
        ("hold", f"scheduled-{tag}", scheduled.id),
    ]
    for each in waiting:
        eventually(lambda each=each: is_held(stage, *each), message=f"{each} is not held")
    worker.wait_for_log(rf"{linked.id}\] received")
    # Known to the store by the rounds that others are, or never.
    last = stage.call("quick", f"last-{tag}")
    eventually(lambda: is_held(stage, "quick", f"last-{tag}", last.id))
    assert not is_held(stage, "quick", f"linked-{tag}", linked.id)

    worker.kill()
    second = stage.start_worker(concurrency=2)

    for task, called_tag, task_id in waiting:
        number = 1 if task_id in (prefetched.id, scheduled.id) else 2
        before = {running.id, calling.id}
        assert call_until_it_begins(stage, task, called_tag, number) <= {task_id, *before}
        assert stage.begins(called_tag)[-1]["id"] == task_id
        stage.props.let_go(called_tag)
    for result in (rerun, prefetched, scheduled):
        stage.end_of(result, "SUCCESS")
    # A copy would not have its callbacks: it waits for its own message.
    assert stage.duplicate("quick", f"linked-{tag}").id == linked.id
    assert stage.begins(f"linked-{tag}") == []

    assert deliver_again(stage) >= 6
    for result in (rerun, prefetched, scheduled):
        eventually(lambda result=result: drops(stage, result), message="it is not dropped")
    stage.end_of(linked, "SUCCESS")
    for _, called_tag, task_id in waiting:
        expected = 1 if task_id in (prefetched.id, scheduled.id) else 2
        assert len(stage.begins(called_tag)) == expected
    second.kill()


def test_what_a_worker_returns_when_it_stops_waits_in_the_broker(stage, tag):
    worker = stage.start_worker()
    running = stage.call("hold", f"running-{tag}")
    stage.wait_for_begin(f"running-{tag}")
    result = stage.call("quick", tag)
    eventually(lambda: is_held(stage, "quick", tag, result.id))

    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    stage.props.let_go(f"running-{tag}")
    eventually(lambda: not worker.is_running(), timeout=40)
    stage.end_of(running, "SUCCESS")

    assert stage.begins(tag) == []
    assert not is_held(stage, "quick", tag, result.id)
    assert stage.duplicate("quick", tag).id == result.id
    assert stage.props.redis.llen("celery") == 1
