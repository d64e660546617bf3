"""A worker that is told to stop while it runs one task and holds the message of another."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import celery
import pytest

import celery_unique
from tests.support import eventually
from tests.support.stage import Stage
from tests.workers.apps.dying import DIES_BEFORE, READS_NOTHING

pytestmark = pytest.mark.versions


CELERY = tuple(map(int, celery.__version__.split(".")[:2]))
CUTS = [("redis", "cold"), ("redis", "soft"), ("rabbitmq", "cold"), ("rabbitmq", "soft")]

MakeStage = Callable[..., Stage]


@pytest.fixture
def stage_at(request: pytest.FixtureRequest, own_stage: MakeStage) -> MakeStage:
    """``stage_at("rabbitmq", **settings)``: with a worker that runs one task at a time."""

    def make(broker: str, **settings: Any) -> Stage:
        url = None if broker == "redis" else request.getfixturevalue(f"{broker}_url")
        stage = own_stage(broker=url, **settings)
        stage.start_worker(concurrency=1, log_level="DEBUG")
        return stage

    return make


@pytest.mark.parametrize(
    ("broker", "pool", "task"),
    [
        ("redis", "prefork", "hold"),
        ("redis", "prefork", "hold_late"),
        pytest.param(
            *("redis", "threads", "hold_late"),
            marks=pytest.mark.skipif(CELERY < (5, 7), reason="there it runs what waits as well"),
        ),
        ("rabbitmq", "prefork", "hold_late"),
    ],
)
def test_a_warm_shutdown_ends_what_runs_and_keeps_the_key_of_what_waits(
    stage_at, tag, broker, pool, task
):
    stage = stage_at(broker, pool=pool)
    running = stage.call(task, tag)
    stage.wait_for_run(tag)
    waiting = stage.call(task, f"waiting-{tag}")
    stage.worker.wait_for_log(f"{waiting.id}.* received")

    stage.worker.send_signal(signal.SIGTERM)
    stage.worker.wait_for_log("Warm shutdown")
    if pool == "threads":  # a thread would take the waiting task, up to this moment
        stage.worker.wait_for_log("Worker: Stopping Pool")
    assert stage.duplicate(task, tag).id == running.id
    stage.props.let_go(tag)

    # No second signal: at the very end of a process it kills.
    eventually(lambda: not stage.worker.is_running(), timeout=30)
    assert stage.worker.exit_code == 0
    assert stage.end_of(running, "SUCCESS") == tag
    stage.wait_until_free(task, tag)
    stage.assert_released(running, "completed")
    assert stage.duplicate(task, f"waiting-{tag}").id == waiting.id
    _runs_in_the_next_worker(stage, task, f"waiting-{tag}", waiting)


@pytest.mark.parametrize("backend", ["redis", "database", "ignored"])
def test_rabbitmq_runs_no_body_again_that_ended_in_a_warm_shutdown_and_was_not_read(
    own_stage, rabbitmq_url, tag, tmp_path, backend
):
    """Its message is not acknowledged, and comes back."""
    settings = {"task_ignore_result": True} if backend == "ignored" else {}
    if backend == "database":
        settings["backend"] = f"db+sqlite:///{tmp_path / 'results.sqlite3'}?timeout=30"
    stage = own_stage(broker=rabbitmq_url, **settings)
    first = stage.send("hold_late", tag)
    _ends_unread(stage, tag)

    assert stage.lock("hold_late", tag) is None
    stage.start_worker()
    stage.worker.wait_for_log(rf"dropped hold_late\[{first.id}\]: it has already finished")
    assert stage.props.runs(tag) == 1
    if backend != "ignored":
        assert stage.end_of(first, "SUCCESS") == tag


def test_rabbitmq_runs_a_body_again_that_was_not_read_and_continues_in_a_canvas(
    own_stage, rabbitmq_url, tag
):
    """Whether all that follows was sent is not known: better twice than never."""
    stage = own_stage(broker=rabbitmq_url, unique_run_lease=3)
    stage.send("hold_late", tag, link=stage.app.tasks["succeed"].si(f"linked-{tag}"))
    _ends_unread(stage, tag)

    stage.start_worker()

    stage.wait_for_run(tag, 2)
    stage.props.let_go(tag, run=2)
    stage.wait_until_free("hold_late", tag)


def _ends_unread(stage: Stage, tag: str) -> None:
    """Run the body to its end in a warm shutdown that does not read its result."""
    worker = stage.start_worker(concurrency=1, env={DIES_BEFORE: READS_NOTHING}, log_level="DEBUG")
    stage.wait_for_run(tag)
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Worker: Stopping Pool")
    stage.props.let_go(tag)
    eventually(lambda: not worker.is_running(), timeout=30)


@pytest.mark.parametrize(("broker", "how"), CUTS)
def test_a_shutdown_that_cuts_a_task_short_frees_its_key(stage_at, tag, broker, how):
    """Its message is acknowledged: Celery says RETRY, and never runs it again."""
    stage = _cut_short(stage_at, broker, how, "hold", tag)

    assert stage.lock("hold", tag) is None

    stage.start_worker()
    second = stage.call("hold", tag)
    stage.wait_for_run(tag, 2)
    stage.props.let_go(tag, run=2)
    stage.end_of(second, "SUCCESS")
    stage.assert_nothing_left(second)
    assert stage.props.runs(tag) == 2


@pytest.mark.parametrize(("broker", "how"), CUTS)
def test_a_shutdown_that_requeues_a_task_keeps_its_key(stage_at, tag, broker, how):
    stage = _cut_short(stage_at, broker, how, "hold_late", tag)

    lock = stage.lock("hold_late", tag)
    assert lock is not None
    first = stage.duplicate("hold_late", tag)
    assert first.id == lock.task_id

    stage.start_worker()
    stage.wait_for_run(tag, 2)  # at once: no lease has to lapse for it
    assert stage.duplicate("hold_late", tag).id == first.id
    stage.props.let_go(tag, run=2)
    stage.wait_for_result(first, "SUCCESS")
    stage.wait_until_free("hold_late", tag)
    assert stage.props.runs(tag) == 2


@pytest.mark.parametrize(
    "pool",
    [
        "threads",
        "gevent",
        pytest.param(
            "solo",
            marks=pytest.mark.skipif(CELERY < (5, 7), reason="there such a worker goes on"),
        ),
    ],
)
def test_a_cold_shutdown_of_a_pool_without_processes_leaves_no_lock(stage_at, tag, pool):
    """Celery waits for a thread, and takes a greenlet that it has killed for a success: its
    message is acknowledged in each case, so that the key has to be free."""
    stage = stage_at("redis", pool=pool)
    first = stage.call("hold_late", tag)
    stage.wait_for_run(tag)

    stage.worker.send_signal(signal.SIGQUIT)
    stage.worker.wait_for_log("will terminate all running tasks")
    stage.props.let_go(tag)

    eventually(lambda: not stage.worker.is_running(), timeout=60)
    # A done mark may stay, since the acknowledgement may come too late; it holds no key.
    key = first.unique_key
    eventually(lambda: celery_unique.lookup(key=key, app=stage.app) is None)


def test_a_soft_shutdown_lets_a_short_task_end(stage_at, tag):
    stage = stage_at("redis", worker_soft_shutdown_timeout=60)
    first = stage.call("hold", tag)
    stage.wait_for_run(tag)

    stage.worker.send_signal(signal.SIGQUIT)
    stage.worker.wait_for_log("Initiating Soft Shutdown")
    stage.props.let_go(tag)

    stage.end_of(first, "SUCCESS")
    assert stage.lock("hold", tag) is None
    stage.assert_released(first, "completed")
    stage.assert_nothing_left(first)


def _cut_short(stage_at: MakeStage, broker: str, how: str, task: str, tag: str) -> Stage:
    """The stage after a worker was stopped in the middle of a task."""
    timeout = {"worker_soft_shutdown_timeout": 0.5} if how == "soft" else {}
    stage = stage_at(broker, **timeout)
    stage.call(task, tag)
    stage.wait_for_run(tag)
    stage.worker.send_signal(signal.SIGQUIT)
    eventually(lambda: not stage.worker.is_running(), timeout=60)
    return stage


def _runs_in_the_next_worker(stage: Stage, task: str, tag: str, result: Any) -> None:
    stage.start_worker()
    stage.wait_for_run(tag)
    stage.props.let_go(tag)
    assert stage.end_of(result, "SUCCESS") == tag
    stage.wait_until_free(task, tag)
    assert stage.props.runs(tag) == 1
