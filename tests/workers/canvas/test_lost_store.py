"""The lock store loses its data while calls follow a task: their canvas ends all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord
from celery import exceptions as celery_exceptions

from celery_unique.config.app_state import state_of
from celery_unique.locks import key_of_call
from tests.support import RedisServer, eventually
from tests.support.stage import Stage
from tests.workers.canvas.shapes import Cast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: A worker looks three times in it.
RUN_LEASE_S = 3

Lose = Callable[[RedisServer], None]


def flush(server: RedisServer) -> None:
    server.client().flushall()


def restart(server: RedisServer) -> None:
    """It keeps nothing on disk."""
    server.kill()
    server.restart()


def evict_followers(server: RedisServer) -> None:
    """The locks stay."""
    client = server.client()
    names = [name for name in client.scan_iter("cu:*") if b"}f" in name]
    assert client.delete(*names) == 1


WAYS = [flush, restart, evict_followers]


@pytest.fixture
def store_server(start_server: Callable[..., RedisServer]) -> RedisServer:
    """For the locks alone: broker and results are in another one."""
    return start_server(RedisServer)


@pytest.fixture
def make_stage(
    own_canvas_stage: Callable[..., Stage], store_server: RedisServer
) -> Callable[..., Stage]:
    def make(pool: str, **settings: Any) -> Stage:
        settings = {"unique_run_lease": RUN_LEASE_S, "unique_publish_grace": 3, **settings}
        stage = own_canvas_stage(pool, unique_store_url=store_server.url, **settings)
        stage.start_worker()
        return stage

    return make


def get(result: Any) -> Any:
    try:
        return result.get(timeout=60, propagate=False, interval=0.05)
    except celery_exceptions.TimeoutError:
        return "no result"


def key_of(c: Cast, task: str) -> str:
    return key_of_call(state_of(c.app), c.app.tasks[f"unique.{task}"], (c.tag,), {})


def wait_until_the_worker_has_looked(server: RedisServer) -> None:
    """It renews, reads who follows, and renews once more: nobody else runs scripts meanwhile."""

    def scripts() -> int:
        told = server.client().info("commandstats")
        return sum(
            told.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")
        )

    before = scripts()
    eventually(lambda: scripts() >= before + 3, timeout=60, message="nothing is renewed")


@pytest.mark.parametrize("lose", WAYS)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_chord_completes_although_the_store_loses_the_followers_of_a_task_that_runs(
    make_stage, store_server, pool, lose
):
    stage = make_stage(pool)
    c = Cast(stage.app, "unique")
    holder = c.running()
    chords = [chord([c.hold.s(c.tag), c.echo.s(n)], c.total.s())() for n in (5, 6)]
    wait_until_the_worker_has_looked(store_server)

    lose(store_server)
    c.let_go()

    ended = [get(holder), *map(get, chords)]
    assert ended == ["held", ["5", "held"], ["6", "held"]], stage.log()[-8000:]
    assert c.runs == 1, "they get the stored result"
    stage.workers[0].wait_for_log("the lock store lost this follower of task", 60)
    eventually(lambda: state_of(c.app).store.followers(key_of(c, "hold")) == [], timeout=60)


def wait_until_the_worker_has_looked_in_vain(server: RedisServer) -> None:
    """It renews each lock once more, and is told that there is none."""
    calls = "cmdstat_evalsha"
    before = server.client().info("commandstats")[calls]["calls"]
    eventually(lambda: server.client().info("commandstats")[calls]["calls"] > before, timeout=60)


def test_chain_goes_on_behind_a_task_that_ignores_its_result(make_stage, store_server):
    """Nobody can ask for its result: its follower runs itself."""
    stage = make_stage("prefork", task_ignore_result=True)
    c = Cast(stage.app, "unique")
    c.running()
    chain(c.hold.si(c.tag), c.note_here)()
    wait_until_the_worker_has_looked(store_server)

    flush(store_server)
    wait_until_the_worker_has_looked_in_vain(store_server)
    c.let_go()

    assert c.noted(1) == ['"held"']


def test_chord_completes_whose_member_follows_a_task_that_waits_in_a_worker(
    make_stage, store_server
):
    stage = make_stage("threads")
    c = Cast(stage.app, "unique")
    c.work.apply_async((c.tag, "late"), countdown=8)
    result = chord([c.work.s(c.tag, "late"), c.echo.s(5)], c.total.s())()
    wait_until_the_worker_has_looked(store_server)

    flush(store_server)

    assert get(result) == ["5", "late"]
    assert c.runs == 1


def test_a_worker_that_stops_leaves_no_lost_follower_behind(make_stage, store_server):
    """It looks a last time: the task has ended between two rounds."""
    stage = make_stage("prefork")
    c = Cast(stage.app, "unique")
    holder = c.running()
    result = chain(c.hold.si(c.tag), c.echo.s())()
    wait_until_the_worker_has_looked(store_server)
    flush(store_server)
    c.let_go()
    assert get(holder) == "held"
    stage.workers[0].stop()

    stage.start_worker()

    assert get(result) == "held"


def test_followers_are_not_completed_twice_where_nothing_was_lost(make_stage, store_server):
    stage = make_stage("prefork", task_ignore_result=True)
    c = Cast(stage.app, "unique")
    c.running()
    chain(c.hold.si(c.tag), c.note_here)()
    wait_until_the_worker_has_looked(store_server)
    c.let_go()
    assert c.noted(1) == ['"held"']

    stage.workers[0].stop()  # the last look, and all rounds before

    assert c.app.props.redis.llen(f"noted:unique-{c.tag}") == 1
    assert c.runs == 1
    assert "lost this follower" not in stage.log()
