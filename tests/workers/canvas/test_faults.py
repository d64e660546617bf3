"""A holder that dies, is revoked or expires: whoever follows it neither hangs nor is lost."""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from celery import chain, chord, group

from celery_unique.config.app_state import state_of
from celery_unique.locks import key_of_call
from celery_unique.stores.base import Claim
from celery_unique.stores.record import letters
from tests.support import eventually
from tests.support.stage import Stage
from tests.workers.canvas.dying import DIES, DIES_AT
from tests.workers.canvas.shapes import HELD, Cast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Short, so that the dead are found soon; long for a machine that is busy.
RUN_LEASE_S = 3

MakeStage = Callable[..., Stage]


@pytest.fixture(scope="module")
def make_stage(make_canvas_stage: MakeStage) -> MakeStage:
    return partial(make_canvas_stage, unique_run_lease=RUN_LEASE_S)


@pytest.fixture(scope="module", params=[pytest.param("prefork", marks=pytest.mark.versions)])
def stage(request: pytest.FixtureRequest, make_stage: MakeStage) -> Stage:
    """A worker that all tests share which leave it alive."""
    stage = make_stage(request.param)
    stage.start_worker()
    return stage


def cast_of(stage: Stage) -> Cast:
    return Cast(stage.app, "unique")


def let_holders_through(c: Cast) -> None:
    """From here on the worker consumes the queue in which holders wait."""
    # A busy worker may not answer within the second for which Celery waits.
    eventually(lambda: c.app.control.add_consumer(HELD, reply=True), timeout=60)


def held_back(c: Cast) -> None:
    eventually(lambda: c.app.control.cancel_consumer(HELD, reply=True), timeout=60)


def get(result: Any) -> Any:
    return result.get(timeout=60, propagate=False, interval=0.05)


def members_counted(result: Any) -> int:
    """Of the chord whose body has this result."""
    backend = result.backend
    return int(backend.client.zcard(backend.get_key_for_group(result.parent.id, ".j")))


def states(results: Any) -> list[str]:
    for result in results:
        get(result)
    return [result.state for result in results]


# -- the holder's worker dies ------------------------------------------------------------


def test_all_of_fifty_chords_complete_whose_members_follow_a_killed_task(make_stage):
    stage = make_stage("prefork")
    c = cast_of(stage)
    worker = stage.start_worker()
    c.running()
    chords = [chord([c.hold.s(c.tag), c.echo.s(n)], c.total.s())() for n in range(50)]
    for result in chords:
        # Or Celery would lose it with its worker, which counts it after its result is stored.
        eventually(lambda result=result: members_counted(result) == 1)

    worker.kill()
    stage.start_worker()
    c.let_go()

    values = [get(result) for result in chords]
    assert values == [sorted([str(n), "held"]) for n in range(50)], stage.log()[-8000:]
    assert c.runs == 2, "one of the followers was run, and the others got its result"
    eventually(lambda: state_of(c.app).store.followers(key_of(c, "hold")) == [])


# -- its worker dies while it completes followers -----------------------------------------

#: What the holder does, and where its worker dies: see dying.py.
DEATHS = [
    *(("work", when) for when in ("before", "sent", "stored", "body", "after")),
    *(("fail", when) for when in ("before", "stored", "after")),
]
FOLLOWERS = 20


@dataclass
class Scene:
    """Calls that follow one task, whose worker dies."""

    cast: Cast
    task: str
    results: list[Any]

    @property
    def followers_left(self) -> int:
        return len(state_of(self.cast.app).store.followers(key_of(self.cast, self.task)))

    def values(self) -> list[Any]:
        """What all came to, once nobody has anything left to do for them."""
        values = [get(result) for result in self.results]
        eventually(lambda: self.followers_left == 0, timeout=60)
        return values

    def noted(self, where: str, number: int = 1) -> list[str]:
        """What callbacks were told, once everything has run that was sent."""
        self.cast.noted(number, where)
        for _ in range(2):  # behind all callbacks, and behind what these have called
            get(self.cast.echo.apply_async((1,), queue="later"))
        return self.cast.noted(number, where)


@pytest.fixture(scope="module")
def killed(make_stage: MakeStage) -> dict[tuple[str, str], Scene]:
    """A worker for each, all at work at once; and one that goes on when they are dead.

    That one handles one message after the other. It alone has callbacks in its queue: what
    the others had taken would die with them.
    """
    stage, scenes = make_stage("prefork"), {}
    for task, when in DEATHS:
        c = cast_of(stage)
        getattr(c, task).apply_async((c.tag,), queue=c.tag)
        followed = chord_of_two if when == "body" else FOLLOWED[task]
        results = [followed(c, n) for n in range(FOLLOWERS)]
        stage.start_worker(wait=False, env={DIES_AT: "7", DIES: when}, queues=(c.tag,))
        scenes[task, when] = Scene(c, task, results)
    for worker in stage.workers:
        eventually(lambda worker=worker: not worker.is_running(), timeout=60)
    stage.start_worker(pool="solo", concurrency=1, queues=("celery", "later"))
    return scenes


def chord_with_a_callback(c: Cast, n: int) -> Any:
    note = c.note.s(where=f"{c.tag}-{n}").set(queue="later")
    body = c.total.s().set(queue="later", link=c.note.s(where=f"body-{c.tag}").set(queue="later"))
    return chord([c.work.s(c.tag).set(link=note), c.echo.s(n).set(queue="later")], body)()


def chord_of_two(c: Cast, n: int) -> Any:
    """Both are followers, so that the worker which completes them sends the body."""
    # Not retried: then Celery lets another worker send it a few seconds after this one died.
    return chord([c.work.s(c.tag), c.work.s(c.tag)], c.total.s().set(queue="later", retry=False))()


def chain_with_an_error_callback(c: Cast, n: int) -> Any:
    return chain(c.fail.si(c.tag).set(link_error=c.note_error.s().set(queue="later")), c.echo.s())()


FOLLOWED = {"work": chord_with_a_callback, "fail": chain_with_an_error_callback}


@pytest.mark.parametrize("when", ["before", "sent", "stored", "after"])
def test_followers_are_completed_although_the_worker_dies_in_the_middle(killed, when):
    scene = killed["work", when]

    assert scene.values() == [sorted([str(n), "1"]) for n in range(FOLLOWERS)]
    assert scene.cast.runs == 1, "its result is stored: nobody runs it again"
    told = [len(scene.noted(f"{scene.cast.tag}-{n}")) for n in range(FOLLOWERS)]
    # The one gap: its callbacks are sent, and nothing says so to whoever comes next.
    twice = 1 if when == "sent" else 0
    assert sorted(told) == [1] * (FOLLOWERS - twice) + [2] * twice
    bodies = scene.noted(f"body-{scene.cast.tag}", FOLLOWERS)
    assert len(bodies) == FOLLOWERS, "every chord was counted once"


@pytest.mark.parametrize("when", ["before", "stored", "after"])
def test_followers_fail_with_all_that_waits_for_them_although_the_worker_dies_in_the_middle(
    killed, when
):
    """Celery fails the rest of a chain and sends error callbacks after it stored the failure."""
    scene = killed["fail", when]

    ends = [*scene.values(), *(get(tail.parent) for tail in scene.results)]
    assert [type(error) for error in ends] == [ValueError] * 2 * FOLLOWERS
    assert scene.cast.runs == 1
    told = [len(scene.noted(tail.parent.id)) for tail in scene.results]
    twice = 1 if when == "after" else 0
    assert sorted(told) == [1] * (FOLLOWERS - twice) + [2] * twice


def test_the_body_of_a_chord_is_sent_although_the_worker_dies_when_it_is_to_send_it(killed):
    """Celery keeps others from sending it for some seconds: longer than a run lease, here."""
    scene = killed["work", "body"]

    assert scene.values() == [["1", "1"]] * FOLLOWERS
    assert scene.cast.runs == 1


#: How many workers are killed at random moments, and how many at once. The figure of the
#: documentation is for 200.
KILLS = int(os.environ.get("CELERY_UNIQUE_KILLS", "4"))
KILLS_AT_ONCE = 4


@pytest.mark.timeout(120 + 20 * KILLS)
def test_a_worker_killed_at_any_moment_leaves_no_follower_behind(make_stage, report):
    """And completes none twice, but for the callbacks of the one that it was at."""
    stage = make_stage("solo")
    stage.start_worker(queues=("celery", "later"))
    halfway = twice = 0
    for _ in range(0, KILLS, KILLS_AT_ONCE):
        deaths = [RandomDeath(stage) for _ in range(KILLS_AT_ONCE)]
        for death in deaths:
            eventually(lambda death=death: not death.worker.is_running(), timeout=60)
            halfway += death.scene.followers_left > 0
        twice += sum(death.callbacks_sent_twice() for death in deaths)
    report(
        f"of {KILLS} workers killed at random moments, {halfway} had some of their {FOLLOWERS} "
        f"followers left to complete; none of these was lost, no chord was counted twice, and "
        f"{twice} of {KILLS * FOLLOWERS} followers had their callbacks twice"
    )


class RandomDeath:
    """A worker that is killed while it completes the header of a chord, all of it followers."""

    def __init__(self, stage: Stage) -> None:
        c = cast_of(stage)
        c.work.apply_async((c.tag,), queue=c.tag)
        self._links = [f"{c.tag}-{n}" for n in range(FOLLOWERS)]
        notes = [c.note.s(where=where).set(queue="later") for where in self._links]
        body = c.total.s().set(queue="later", link=c.note.s(where=c.tag).set(queue="later"))
        header = [c.work.s(c.tag).set(link=note) for note in notes]
        # Celery sends the body with the last member: none of the followers is that.
        header.append(c.echo.s("last").set(queue=f"last-{c.tag}"))
        result = chord(header, body)()
        self.scene = Scene(c, "work", [result])
        env = {DIES_AT: str(random.randrange(1, FOLLOWERS - 3)), DIES: "random"}
        self.worker = stage.start_worker(wait=False, env=env, queues=(c.tag,))

    def callbacks_sent_twice(self) -> int:
        """Of how many followers, once all are completed."""
        scene = self.scene
        eventually(lambda: scene.followers_left == 0, timeout=60)
        scene.cast.app.control.add_consumer(f"last-{scene.cast.tag}", reply=True)
        assert scene.values() == [["1"] * FOLLOWERS + ["last"]]
        assert len(scene.noted(scene.cast.tag)) == 1, "the chord was counted once"
        assert scene.cast.runs == 1
        told = [len(scene.cast.noted(1, where)) for where in self._links]
        assert set(told) <= {1, 2}
        assert told.count(2) <= 1, "a worker completes one after the other"
        return told.count(2)


# -- the holder was never published -------------------------------------------------------


def test_followers_of_a_task_whose_publisher_died_are_run(stage):
    c = cast_of(stage)
    runtime = state_of(c.app)
    key = key_of(c, "work")
    policy = runtime.policies.of("unique.work", c.work, {}, runtime.settings.app_defaults)[0]
    claim = Claim(uuid.uuid4().hex, "unique.work", letters(policy.states), 1000)
    assert runtime.store.acquire(key, claim).outcome == "created"

    result = chain(c.work.si(c.tag, "done"), c.echo.s())()

    assert get(result) == "done"
    assert c.runs == 1


# -- the holder comes to an end of another kind ------------------------------------------


def test_followers_of_a_killed_process_get_its_failure(stage):
    c = cast_of(stage)
    c.running()
    result = chain(c.hold.si(c.tag), c.echo.s())()

    os.kill(c.app.props.pids(f"unique-{c.tag}")[0], signal.SIGKILL)

    error = get(result)
    assert type(error).__name__ == "WorkerLostError"
    assert c.runs == 1


def test_followers_of_a_task_at_its_time_limit_get_its_failure(stage):
    c = cast_of(stage)
    c.limited.apply_async((c.tag,), queue=f"held-back-{c.tag}")  # or its limit could be reached
    results = [c.limited.apply_async((c.tag,), task_id=uuid.uuid4().hex) for _ in range(3)]

    c.app.props.redis.lmove(f"held-back-{c.tag}", "celery", "RIGHT", "LEFT")

    assert [type(get(result)).__name__ for result in results] == ["TimeLimitExceeded"] * 3
    assert c.runs == 1


def test_followers_of_a_terminated_task_are_revoked_with_it(stage):
    c = cast_of(stage)
    holder = c.running()
    result = chain(c.hold.si(c.tag), c.echo.s())()

    holder.revoke(terminate=True)

    assert states([result, result.parent]) == ["REVOKED", "REVOKED"]
    assert c.runs == 1


def test_followers_of_a_task_revoked_in_the_queue_are_revoked_with_it(stage):
    c = cast_of(stage)
    held_back(c)
    holder = c.holder()
    members = group(c.work.s(c.tag), c.work.s(c.tag))().results

    holder.revoke()

    assert states(members) == ["REVOKED", "REVOKED"]
    let_holders_through(c)
    assert states([holder]) == ["REVOKED"]
    assert c.runs == 0


def test_a_follower_of_an_expired_task_is_run(stage):
    c = cast_of(stage)
    held_back(c)
    expires = datetime.now(UTC) + timedelta(seconds=1)
    c.holder(expires=expires)
    result = group(c.work.s(c.tag, "mine"), c.work.s(c.tag, "mine"))()
    eventually(lambda: datetime.now(UTC) > expires)

    let_holders_through(c)

    assert [get(member) for member in result.results] == ["mine", "mine"]
    assert c.runs == 1


def test_a_follower_of_an_ignored_task_is_run(stage):
    c = cast_of(stage)
    let_holders_through(c)
    members = group(c.waiting("ignore_first"), c.waiting("ignore_first"))().results

    assert get(members[1]) == "the second"
    assert c.runs == 2


def test_followers_of_a_superseded_task_follow_the_one_in_its_place(stage):
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


def test_followers_of_a_task_that_is_acknowledged_late(stage):
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
    return key_of_call(state_of(c.app), f"unique.{task}", (c.tag,), None)
