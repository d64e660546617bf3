"""A holder that dies, is revoked or expires: whoever follows it neither hangs nor is lost."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, group

from celery_unique.locks import key_of_call
from celery_unique.runtime import runtime_of
from celery_unique.stores.base import Claim
from celery_unique.stores.record import letters
from tests.acceptance.canvas.dying import DIES, DIES_AT
from tests.acceptance.canvas.shapes import HELD, Cast
from tests.acceptance.canvas.stage import CanvasStage
from tests.kit import RedisServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Short, so that the dead are found soon; long for a machine that is busy.
RUN_LEASE_S = 3

MakeStage = Callable[..., CanvasStage]


@pytest.fixture(scope="module")
def make_canvas_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    stages: list[CanvasStage] = []

    def make(pool: str = "prefork", **settings: Any) -> CanvasStage:
        settings = {"unique_run_lease": RUN_LEASE_S, **settings}
        directory = tmp_path_factory.mktemp("faults")
        stages.append(CanvasStage(redis_server, directory, pool, **settings))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture(scope="module", params=[pytest.param("prefork", marks=pytest.mark.versions)])
def stage(request: pytest.FixtureRequest, make_canvas_stage: MakeStage) -> CanvasStage:
    """A worker that all tests share which leave it alive."""
    stage = make_canvas_stage(request.param)
    stage.start_worker()
    return stage


def cast_of(stage: CanvasStage) -> Cast:
    return Cast(stage.app, "unique")


def let_holders_through(c: Cast) -> None:
    """From here on the worker consumes the queue in which holders wait."""
    c.app.control.add_consumer(HELD, reply=True)


def held_back(c: Cast) -> None:
    c.app.control.cancel_consumer(HELD, reply=True)


def get(result: Any) -> Any:
    return result.get(timeout=60, propagate=False, interval=0.05)


def states(results: Any) -> list[str]:
    for result in results:
        get(result)
    return [result.state for result in results]


# -- the holder's worker dies ------------------------------------------------------------


def test_all_of_fifty_chords_complete_whose_members_follow_a_killed_task(
    make_canvas_stage: MakeStage,
) -> None:
    stage = make_canvas_stage()
    c = cast_of(stage)
    worker = stage.start_worker()
    c.running()
    chords = [chord([c.hold.s(c.tag), c.echo.s(n)], c.total.s())() for n in range(50)]
    for result in chords:
        get(result.parent.results[1])  # or Celery would lose it with its worker

    worker.kill()
    stage.start_worker()
    c.let_go()

    values = [get(result) for result in chords]
    assert values == [sorted([str(n), "held"]) for n in range(50)], stage.log()[-8000:]
    assert c.runs == 2, "one of the followers was run, and the others got its result"
    eventually(lambda: runtime_of(c.app).store.followers(key_of(c, "hold")) == [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_followers_are_completed_although_the_worker_dies_in_the_middle(
    make_canvas_stage: MakeStage, when: str
) -> None:
    """Before the store has heard that one is completed, or before the next one begins."""
    stage = make_canvas_stage()
    c = cast_of(stage)
    dying = stage.start_worker(env={DIES_AT: "7", DIES: when})
    c.running()
    # In a queue of another worker: what this one has taken would die with it.
    note, total = c.note_here.set(queue="later"), c.total.s().set(queue="later")
    chords = [
        chord([c.hold.s(c.tag).set(link=note), c.echo.s(n).set(queue="later")], total.clone())()
        for n in range(20)
    ]

    c.let_go()
    eventually(lambda: not dying.is_running(), timeout=60)
    stage.start_worker(queues=("celery", "later"))

    values = [get(result) for result in chords]
    assert values == [sorted([str(n), "held"]) for n in range(20)], stage.log()[-8000:]
    assert c.runs == 1, "its result is stored: nobody runs it again"
    assert c.noted(20) == ['"held"'] * 20, "no callback is lost, and none is sent twice"


def test_followers_of_a_task_whose_publisher_died_are_run(stage: CanvasStage) -> None:
    c = cast_of(stage)
    runtime = runtime_of(c.app)
    key = key_of(c, "work")
    policy = runtime.policies.of("unique.work", c.work, {}, runtime.settings.app_defaults)[0]
    claim = Claim(uuid.uuid4().hex, "unique.work", letters(policy.states), 1000)
    assert runtime.store.acquire(key, claim).outcome == "created"

    result = chain(c.work.si(c.tag, "done"), c.echo.s())()

    assert get(result) == "done"
    assert c.runs == 1


# -- the holder comes to an end of another kind ------------------------------------------


def test_followers_of_a_killed_process_get_its_failure(stage: CanvasStage) -> None:
    c = cast_of(stage)
    c.running()
    result = chain(c.hold.si(c.tag), c.echo.s())()

    os.kill(c.app.props.pids(f"unique-{c.tag}")[0], signal.SIGKILL)

    error = get(result)
    assert type(error).__name__ == "WorkerLostError"
    assert c.runs == 1


def test_followers_of_a_task_at_its_time_limit_get_its_failure(stage: CanvasStage) -> None:
    c = cast_of(stage)
    c.limited.delay(c.tag)
    eventually(lambda: c.runs, timeout=30)

    results = [c.limited.apply_async((c.tag,), task_id=uuid.uuid4().hex) for _ in range(3)]

    assert [type(get(result)).__name__ for result in results] == ["TimeLimitExceeded"] * 3
    assert c.runs == 1


def test_followers_of_a_terminated_task_are_revoked_with_it(stage: CanvasStage) -> None:
    c = cast_of(stage)
    holder = c.running()
    result = chain(c.hold.si(c.tag), c.echo.s())()

    holder.revoke(terminate=True)

    assert states([result, result.parent]) == ["REVOKED", "REVOKED"]
    assert c.runs == 1


def test_followers_of_a_task_revoked_in_the_queue_are_revoked_with_it(stage: CanvasStage) -> None:
    c = cast_of(stage)
    held_back(c)
    holder = c.holder()
    members = group(c.work.s(c.tag), c.work.s(c.tag))().results

    holder.revoke()

    assert states(members) == ["REVOKED", "REVOKED"]
    let_holders_through(c)
    assert states([holder]) == ["REVOKED"]
    assert c.runs == 0


def test_a_follower_of_an_expired_task_is_run(stage: CanvasStage) -> None:
    c = cast_of(stage)
    held_back(c)
    expires = datetime.now(UTC) + timedelta(seconds=1)
    c.holder(expires=expires)
    result = group(c.work.s(c.tag, "mine"), c.work.s(c.tag, "mine"))()
    eventually(lambda: datetime.now(UTC) > expires)

    let_holders_through(c)

    assert [get(member) for member in result.results] == ["mine", "mine"]
    assert c.runs == 1


def test_a_follower_of_an_ignored_task_is_run(stage: CanvasStage) -> None:
    c = cast_of(stage)
    let_holders_through(c)
    members = group(c.waiting("ignore_first"), c.waiting("ignore_first"))().results

    assert get(members[1]) == "the second"
    assert c.runs == 2


def test_followers_of_a_superseded_task_follow_the_one_in_its_place(stage: CanvasStage) -> None:
    c = cast_of(stage)
    held_back(c)
    holder = c.holder()
    members = group(c.work.s(c.tag), c.work.s(c.tag))().results
    newer = c.work.apply_async(
        (c.tag, "new"), queue=HELD, unique_on_conflict="replace", unique_on="tag"
    )

    let_holders_through(c)

    assert [get(result) for result in (newer, *members)] == ["new", "new", "new"]
    assert states([holder]) == ["REVOKED"]
    assert c.runs == 1


def test_followers_of_a_task_that_is_acknowledged_late(stage: CanvasStage) -> None:
    c = cast_of(stage)
    c.hold_late.delay(c.tag)
    eventually(lambda: c.runs, timeout=30)
    members = group(c.hold_late.s(c.tag), c.hold_late.s(c.tag))().results

    c.let_go()

    assert [get(member) for member in members] == ["held", "held"]
    assert c.runs == 1
    eventually(
        lambda: not list(c.app.props.redis.scan_iter(match=f"cu:*{key_of(c, 'hold_late')}*"))
    )


def key_of(c: Cast, task: str) -> str:
    return key_of_call(runtime_of(c.app), f"unique.{task}", (c.tag,), None)
