"""A task of a canvas whose place another one took follows that one: no canvas hangs or is cut off.

The calls wait in a queue that no worker consumes yet, or a solo task occupies the key; so nothing
has to be timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import chain, chord, group

from celery_unique.config.app_state import state_of
from celery_unique.locks import key_of_call
from tests.support import eventually
from tests.support.stage import Stage
from tests.workers.canvas.dying import DIES_FOLLOWING
from tests.workers.canvas.shapes import Cast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN_LEASE_S = 3

MakeStage = Callable[..., Stage]


@pytest.fixture(scope="module")
def make_stage(make_canvas_stage: MakeStage) -> MakeStage:
    return partial(make_canvas_stage, unique_run_lease=RUN_LEASE_S)


BACKENDS = [
    pytest.param(("prefork", "redis"), marks=pytest.mark.versions, id="prefork, redis"),
    pytest.param(("threads", "database"), id="threads, database"),
]


@pytest.fixture(scope="module", params=BACKENDS)
def stage(request: pytest.FixtureRequest, make_stage: MakeStage) -> Stage:
    stage = make_stage(*request.param)
    stage.start_worker()
    return stage


@pytest.fixture
def c(stage: Stage) -> Cast:
    return Cast(stage.app, "unique")


def get(result: Any) -> Any:
    return result.get(timeout=60, propagate=False, interval=0.05)


def ended(c: Cast, *results: Any) -> list[Any]:
    return [get(result) for result in results]


def values(c: Cast) -> list[Any]:
    """The values with which bodies ran, in order."""
    return [json.loads(one) for one in c.app.props.redis.lrange(f"values:{c.tag}", 0, -1)]


def queue_of(c: Cast) -> str:
    """Where calls of this cast wait until the test lets them through."""
    return f"held-{c.tag}"


def newest(c: Cast, value: Any) -> Any:
    return c.newest.si(c.tag, value).set(queue=queue_of(c))


def let_through(c: Cast) -> None:
    eventually(lambda: c.app.control.add_consumer(queue_of(c), reply=True), timeout=60)


def assert_nothing_is_left(c: Cast, task: str) -> None:
    """No follower, no mark: each message was reached, and each follower completed."""
    key = key_of_call(state_of(c.app), c.app.tasks[f"unique.{task}"], (c.tag,), {})
    store = state_of(c.app).store
    eventually(
        lambda: not store.followers(key) and not store.read(key)[0].marks,
        timeout=60,
        message="a follower or a mark is left",
    )


def running(c: Cast, value: Any = 0) -> Any:
    result = c.rerun.delay(c.tag, value)
    eventually(lambda: c.runs, timeout=60, message="the holder does not run")
    return result


# -- rerun ---------------------------------------------------------------------------------


def test_chains_whose_first_link_reruns_all_end_with_the_newest_run(c):
    first = running(c)
    chains = [chain(c.rerun.si(c.tag, n), c.echo.s())() for n in (1, 2, 3)]

    c.let_go()

    assert get(first) == 0
    assert ended(c, *chains) == [3, 3, 3]
    # As in Celery, a result is stored after the next link of its chain is sent.
    assert ended(c, *(each.parent for each in chains)) == [3, 3, 3]
    assert [each.parent.state for each in chains] == ["SUCCESS"] * 3
    assert values(c) == [0, 3]
    assert_nothing_is_left(c, "rerun")


def test_chords_whose_header_members_rerun_all_complete(c):
    running(c)
    chords = [chord([c.rerun.si(c.tag, n), c.echo.s(5)], c.total.s())() for n in (1, 2, 3)]

    c.let_go()

    assert ended(c, *chords) == [["3", "5"]] * 3
    assert values(c) == [0, 3]
    assert_nothing_is_left(c, "rerun")


def test_links_in_the_middle_and_callbacks_go_on_behind_the_newest_run(c):
    running(c)
    middle = chain(c.echo.s(9), c.rerun.si(c.tag, 1), c.echo.s())()
    eventually(lambda: is_recorded(c, "rerun", middle.parent.id), timeout=60)
    linked = c.rerun.apply_async((c.tag, 2), link=c.note_here)
    last = c.rerun.apply_async((c.tag, 3))

    c.let_go()

    assert ended(c, middle, linked, last) == [3, 3, 3]
    assert c.noted(1) == ["3"]
    assert_nothing_is_left(c, "rerun")


def is_recorded(c: Cast, task: str, task_id: str) -> bool:
    key = key_of_call(state_of(c.app), c.app.tasks[f"unique.{task}"], (c.tag,), {})
    return task_id in state_of(c.app).store.read(key)[0].tasks


# -- replace -------------------------------------------------------------------------------


def test_replaced_members_of_every_kind_get_the_outcome_of_the_one_that_runs(c):
    """A chain of replacements: each call takes the place of the one before."""
    head = chain(newest(c, 1), c.echo.s())()
    grouped = group(newest(c, 2), c.echo.s(5))()
    chorded = chord([newest(c, 3), c.echo.s(5)], c.total.s())()
    linked = newest(c, 4).apply_async(link=c.note_here)
    plain = newest(c, 5).apply_async()
    last = newest(c, 6).apply_async()

    assert plain.state == "REVOKED", "nobody else waits for its id: it ends at once"
    assert [head.parent.state, linked.state] == ["PENDING", "PENDING"]
    let_through(c)

    assert ended(c, head, *grouped, chorded, linked, last) == [6, 6, 5, ["5", "6"], 6, 6]
    assert c.noted(1) == ["6"]
    assert values(c) == [6]
    assert_nothing_is_left(c, "newest")


def test_a_replaced_link_in_the_middle_of_a_chain_hands_on_the_newest_value(c):
    result = chain(c.echo.s(9), newest(c, 1), c.echo.s())()
    eventually(lambda: is_recorded(c, "newest", result.parent.id), timeout=60)
    newest(c, 2).apply_async()

    let_through(c)

    assert get(result) == 2
    assert values(c) == [2]


def test_a_replaced_member_fails_with_the_one_in_its_place(c):
    result = chain(newest(c, 1), c.echo.s())()
    linked = newest(c, 2).apply_async(link_error=c.note_error.s())
    newest(c, "fails").apply_async()

    let_through(c)

    assert isinstance(get(linked), ValueError)
    assert c.noted(1, where=linked.id) == ['"an error"']
    assert (get(result.parent).args, result.parent.state) == (("it failed",), "FAILURE")
    assert isinstance(get(result), ValueError)
    assert_nothing_is_left(c, "newest")


def test_a_replaced_member_is_revoked_with_the_one_in_its_place(c):
    result = chain(newest(c, 1), c.echo.s())()
    last = newest(c, 2).apply_async()
    last.revoke()

    let_through(c)

    get(result)
    assert [result.parent.state, result.state] == ["REVOKED", "REVOKED"]
    assert values(c) == []


def test_a_member_that_is_reached_after_the_end_of_all_that_replaced_it_gets_the_result(c):
    """Its message waits in another queue; the one in between, a plain call, is dropped first."""
    late = f"late-{c.tag}"
    result = chain(newest(c, 1).set(queue=late), c.echo.s())()
    newest(c, 2).apply_async()
    last = newest(c, 3).apply_async()
    let_through(c)
    assert get(last) == 3
    eventually(lambda: marks(c, "newest") == 1, timeout=60, message="the second is not dropped")

    eventually(lambda: c.app.control.add_consumer(late, reply=True), timeout=60)

    assert get(result) == 3
    assert values(c) == [3]
    assert_nothing_is_left(c, "newest")


def marks(c: Cast, task: str) -> int:
    key = key_of_call(state_of(c.app), c.app.tasks[f"unique.{task}"], (c.tag,), {})
    return len(state_of(c.app).store.read(key)[0].marks)


def test_a_member_whose_replacement_left_no_result_is_run_itself(c):
    """Nobody knows the value that the rest of its chain waits for: better twice than never."""
    late = f"late-{c.tag}"
    result = chain(newest(c, 1).set(queue=late), c.echo.s())()
    newest(c, 2).apply_async(ignore_result=True)
    let_through(c)
    eventually(lambda: values(c) == [2], timeout=60)

    eventually(lambda: c.app.control.add_consumer(late, reply=True), timeout=60)

    assert get(result) == 1
    assert values(c) == [2, 1]


# -- no results, rpc, other ways -----------------------------------------------------------


def wait_until_they_follow(stage: Stage, *chains: Any) -> None:
    """What follows before its replacement ends needs no stored result."""
    for each in chains:
        stage.workers[-1].wait_for_log(rf"joined \S+\[{each.parent.id}\] to ", 60)


def test_chains_go_on_without_any_result_backend(make_stage):
    stage = make_stage(backend="redis", task_ignore_result=True)
    stage.start_worker()
    c = Cast(stage.app, "unique")
    running(c)
    chains = [chain(c.rerun.si(c.tag, n), c.note_here)() for n in (1, 2, 3)]
    wait_until_they_follow(stage, *chains[:2])

    c.let_go()

    assert c.noted(3) == ["3", "3", "3"]
    assert values(c) == [0, 3]


def test_chains_end_with_results_by_message(make_stage):
    stage = make_stage(backend="rpc")
    stage.start_worker()
    c = Cast(stage.app, "unique")
    running(c)
    chains = [chain(c.rerun.si(c.tag, n), c.echo.s())() for n in (1, 2, 3)]
    wait_until_they_follow(stage, *chains[:2])

    c.let_go()

    assert ended(c, *chains) == [3, 3, 3]
    assert values(c) == [0, 3]


def test_where_holders_are_concealed_a_replaced_canvas_ends_as_revoked(make_stage):
    """It may not get the result of a stranger's call, and does not hang either."""
    stage = make_stage(unique_conceal_holder=True)
    stage.start_worker()
    c = Cast(stage.app, "unique")
    result = chain(newest(c, 1), c.echo.s())()
    last = newest(c, 2).apply_async()

    let_through(c)

    assert get(last) == 2
    get(result)
    assert [result.parent.state, result.state] == ["REVOKED", "REVOKED"]


def test_a_worker_that_dies_before_it_acknowledges_leaves_the_message_to_the_next(make_stage):
    """Killed between joining its replacement and the acknowledgement, at the worst moment."""
    stage = make_stage(pool="threads", broker_transport_options={"visibility_timeout": 3})
    c = Cast(stage.app, "unique")
    result = chain(newest(c, 1), c.echo.s())()
    last = newest(c, 2).apply_async()
    worker = stage.start_worker(env={DIES_FOLLOWING: "1"}, queues=(queue_of(c),))
    eventually(lambda: not worker.is_running(), timeout=60, message="the worker lives")

    stage.start_worker(queues=("celery", queue_of(c)))

    assert ended(c, result, last) == [2, 2]
    assert values(c) == [2]
