"""What Celery publishes while it finishes a task never turns that task into a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord

from tests.support import RedisServer, TcpProxy, eventually
from tests.support.stage import Stage

pytestmark = pytest.mark.versions


#: How long the circuit of a store that was cut off stays open.
BREAKER_S = 0.05


@pytest.fixture(scope="module")
def store_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(store_server: RedisServer) -> Iterator[TcpProxy]:
    """The worker's way to the store."""
    with TcpProxy(store_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shared_stage(
    make_stage: Callable[..., Stage], store_server: RedisServer, proxy: TcpProxy
) -> Stage:
    stage = make_stage(
        unique_store_url=store_server.url,
        unique_store_timeout=20,  # a store that is cut off refuses at once
        unique_run_lease=60,
        breaker_s=BREAKER_S,
    )
    stage.start_worker(settings={"unique_store_url": proxy.url_of(store_server.url)})
    return stage


@pytest.fixture
def stage(shared_stage: Stage, proxy: TcpProxy) -> Iterator[Stage]:
    shared_stage.props.redis.delete("diary:everybody")
    yield shared_stage
    proxy.restore()
    time.sleep(4 * BREAKER_S)  # until the worker's circuit is closed again


class Canvas:
    """Canvases whose second part is a unique task, with an error callback of its own."""

    def __init__(self, app: Celery, tag: str) -> None:
        self.tasks = app.tasks
        self.tag = tag

    def unique(self, task: str, *args: Any) -> Any:
        return self.tasks[task].s(*args).on_error(self.tasks["errback"].s())

    def chain_link(self, task: str) -> tuple[Any, str]:
        """The first task's result, and the id of the second."""
        result = chain(self.tasks["first"].s(self.tag), self.unique(task)).apply_async()
        return result.parent, result.id

    def chord_body(self, task: str) -> tuple[Any, str]:
        header = [self.tasks["first"].s(self.tag), self.tasks["first"].s(self.tag)]
        result = chord(header, self.unique(f"{task}_of_many")).apply_async()
        return result.parent.results[-1], result.id

    def callback(self, task: str) -> tuple[Any, None]:
        """A callback gets its id in the worker."""
        return self.tasks["first"].apply_async((self.tag,), link=self.unique(task)), None


def wait_for_errback(stage: Stage) -> str:
    """The id of the task whose error callback was run."""
    return str(eventually(lambda: stage.props.notes("everybody", "errback"))[0]["id"])


KINDS = ["chain_link", "chord_body", "callback"]


def hold_key_of_link(stage: Stage, kind: str, tag: str) -> str:
    """Calls that nobody runs: the id that holds the link's key."""
    if kind == "chord_body":
        return str(stage.call("link_of_many", [tag, tag], queue="nobody").id)
    return str(stage.call("link", tag, queue="nobody").id)


@pytest.mark.parametrize("kind", KINDS)
def test_link_whose_key_is_held_fails_under_its_own_id(stage, tag, kind):
    holder = hold_key_of_link(stage, kind, tag)

    finished, link_id = getattr(Canvas(stage.app, tag), kind)("link")

    failed_id = wait_for_errback(stage)
    assert failed_id == (link_id or failed_id) != holder
    failed = stage.app.AsyncResult(failed_id)
    assert (failed.state, type(failed.result).__name__) == ("FAILURE", "DuplicateTask")
    assert stage.end_of(finished, "SUCCESS") == tag
    assert stage.begins(tag) == []


@pytest.mark.parametrize("kind", KINDS)
def test_link_whose_key_cannot_be_made_fails_under_its_own_id(stage, tag, kind):
    finished, link_id = getattr(Canvas(stage.app, tag), kind)("keyless")

    failed_id = wait_for_errback(stage)
    assert failed_id == (link_id or failed_id)
    failed = stage.app.AsyncResult(failed_id)
    assert (failed.state, type(failed.result).__name__) == ("FAILURE", "UniqueKeyError")
    assert stage.end_of(finished, "SUCCESS") == tag


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["link"])
def test_link_is_published_although_the_store_is_away(stage, proxy, tag, kind, task):
    proxy.cut()

    finished, link_id = getattr(Canvas(stage.app, tag), kind)(task)

    run = stage.wait_for_begin(tag)
    assert run["id"] == (link_id or run["id"])
    stage.end_of(stage.app.AsyncResult(run["id"]), "SUCCESS")
    assert stage.end_of(finished, "SUCCESS") == tag
    assert stage.signals(run["id"], "unique_store_error")
    assert stage.props.notes("everybody", "errback") == []


@pytest.mark.parametrize("task", ["fails", "is_killed"])
def test_error_callback_whose_key_is_held_does_not_hide_the_error(stage, tag, task):
    """A killed task is finished by the worker's main process, which must not trip over it."""
    stage.call("link_after_failure", "some id", tag, queue="nobody")
    errback = stage.app.tasks["link_after_failure"].s(tag)

    failed = stage.app.tasks[task].apply_async((tag,), link_error=errback)

    error = stage.end_of(failed, "FAILURE")
    assert type(error).__name__ == {"fails": "ValueError", "is_killed": "WorkerLostError"}[task]
    assert stage.begins(tag) == []
    stage.end_of(stage.app.tasks["first"].delay(tag), "SUCCESS")


@pytest.mark.parametrize("task", ["fails", "is_killed"])
def test_error_callback_is_published_although_the_store_is_away(stage, proxy, tag, task):
    proxy.cut()
    errback = stage.app.tasks["link_after_failure"].s(tag)

    failed = stage.app.tasks[task].apply_async((tag,), link_error=errback)

    stage.wait_for_begin(tag)
    error = stage.end_of(failed, "FAILURE")
    assert type(error).__name__ == {"fails": "ValueError", "is_killed": "WorkerLostError"}[task]


def test_rest_of_a_chain_is_not_left_waiting_behind_a_link_that_failed(stage, tag):
    hold_key_of_link(stage, "chain_link", tag)
    tasks = stage.app.tasks

    result = chain(tasks["first"].s(tag), tasks["link"].s(), tasks["first"].s()).apply_async()

    stage.end_of(result.parent.parent, "SUCCESS")
    stage.end_of(result.parent, "FAILURE")
    stage.end_of(result, "FAILURE")


@pytest.fixture(scope="module")
def sql_stage(
    make_stage: Callable[..., Stage],
    store_server: RedisServer,
    proxy: TcpProxy,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stage:
    """A result backend that cannot count: one of Celery's own tasks publishes a chord's body."""
    results: Path = tmp_path_factory.mktemp("results") / "results.sqlite3"
    stage = make_stage(
        unique_store_url=store_server.url_of(1),
        unique_store_timeout=20,
        unique_run_lease=60,
        result_backend=f"db+sqlite:///{results}",
    )
    stage.start_worker(settings={"unique_store_url": proxy.url_of(store_server.url_of(1))})
    return stage


def test_chord_body_is_published_by_celerys_own_task_although_the_store_is_away(
    sql_stage, proxy, tag
):
    proxy.cut()

    _, body_id = Canvas(sql_stage.app, tag).chord_body("link")

    assert sql_stage.wait_for_begin(tag)["id"] == body_id
    proxy.restore()
