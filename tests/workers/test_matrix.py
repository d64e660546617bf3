"""Ends, redelivery and revoke with every broker, result backend, pool and store.

``make test`` runs the cells that no other test uses, ``make test-matrix`` all of them, and writes
docs/reference/compatibility.md from what they showed (`tests.compatibility`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support import eventually
from tests.workers.matrix import CELLS, Cell
from tests.workers.matrix_stages import MatrixStage, make_matrix_stage

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(240)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    aspect = metafunc.function.__name__.removeprefix("test_")
    cells = [cell for cell in CELLS if cell.chosen and aspect not in cell.without]
    metafunc.parametrize("cell", cells, ids=lambda cell: cell.id, scope="module", indirect=True)


@pytest.fixture(scope="module")
def cell(request: pytest.FixtureRequest) -> Cell:
    chosen: Cell = request.param
    return chosen


@pytest.fixture(scope="module")
def shared_matrix_stage(
    request: pytest.FixtureRequest, cell: Cell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MatrixStage]:
    with ExitStack() as ends:
        yield make_matrix_stage(cell, request, tmp_path_factory.mktemp(cell.id), ends)


@pytest.fixture
def stage(shared_matrix_stage: MatrixStage, record_property: Callable[..., None]) -> MatrixStage:
    shared_matrix_stage.ensure_worker()
    for name, version in shared_matrix_stage.versions.items():
        record_property(name, version)
    return shared_matrix_stage


def assert_free(stage: MatrixStage, task: str, tag: str) -> None:
    """The key is free, and the next call is admitted."""
    stage.wait_until_free(task, tag)
    assert not stage.record(task, tag).tasks
    past = datetime.now(UTC) - timedelta(seconds=1)  # not to run: only its admission counts
    assert stage.app.tasks[task].apply_async((tag,), expires=past).outcome == "created"
    stage.wait_until_free(task, tag)


def assert_dropped(stage: MatrixStage, task: str, tag: str, holder: Any) -> None:
    """A call is a duplicate, of this task. (Where a result reaches one caller only, it joins.)"""
    assert stage.send(task, tag).deduplicated
    lock = stage.lock(task, tag)
    assert lock is not None
    assert lock.task_id == holder.id


# -- ends ------------------------------------------------------------------------------------------


def test_duplicate(stage, tag):
    first = stage.call("hold", tag)
    stage.wait_for_run(tag)

    assert_dropped(stage, "hold", tag, first)

    stage.props.let_go(tag)
    stage.ends(first, "SUCCESS")
    assert_free(stage, "hold", tag)
    assert stage.props.runs(tag) == 1


def test_success(stage, tag):
    first = stage.call("succeed", tag)
    stage.wait_for_run(tag)

    stage.ends(first, "SUCCESS")

    assert_free(stage, "succeed", tag)
    assert stage.props.runs(tag) == 1


def test_failure(stage, tag):
    first = stage.call("fail", tag)
    stage.wait_for_run(tag)

    stage.ends(first, "FAILURE")

    assert_free(stage, "fail", tag)


def test_retry(stage, tag):
    first = stage.call("retry_later", tag)
    stage.wait_for_state("retry_later", tag, state="retryable")

    assert_dropped(stage, "retry_later", tag, first)

    stage.wait_for_run(tag, 2)
    stage.ends(first, "SUCCESS")
    assert_free(stage, "retry_later", tag)
    assert stage.props.runs(tag) == 2


def test_ignore(stage, tag):
    stage.call("ignore", tag)
    stage.wait_for_run(tag)

    assert_free(stage, "ignore", tag)


def test_reject(stage, tag):
    stage.call("reject", tag)
    stage.wait_for_run(tag)

    assert_free(stage, "reject", tag)
    assert stage.props.runs(tag) == 1


def test_expired(stage, tag):
    first = stage.call("succeed", tag, expires=datetime.now(UTC) - timedelta(seconds=1))

    stage.ends(first, "REVOKED")

    assert_free(stage, "succeed", tag)
    assert stage.props.runs(tag) == 0


def test_hard_time_limit(stage, tag):
    first = stage.call("hard_limit", tag)

    stage.ends(first, "FAILURE")

    assert_free(stage, "hard_limit", tag)


def test_lost_child(stage, tag):
    first = stage.call("lose", tag)

    os.kill(stage.wait_for_run(tag), signal.SIGKILL)

    stage.ends(first, "FAILURE")
    assert_free(stage, "lose", tag)


# -- revoke ----------------------------------------------------------------------------------------


def test_revoked(stage, tag):
    """While it waits for its ETA, wherever that is."""
    first = stage.call("succeed", tag, countdown=600)
    assert_dropped(stage, "succeed", tag, first)

    stage.revoke(first)

    assert_free(stage, "succeed", tag)
    assert stage.props.runs(tag) == 0


def test_terminated(stage, tag):
    first = stage.call("hold", tag)
    stage.wait_for_run(tag)

    stage.app.control.revoke(first.id, terminate=True)

    stage.ends(first, "REVOKED")
    assert_free(stage, "hold", tag)


# -- redelivery ------------------------------------------------------------------------------------


def test_requeued(stage, tag):
    """``Reject(requeue=True)``: the broker delivers the same message again."""
    first = stage.call("requeue_once", tag)
    stage.wait_for_run(tag, 2)

    assert_dropped(stage, "requeue_once", tag, first)

    stage.props.let_go(tag)
    stage.ends(first, "SUCCESS")
    assert_free(stage, "requeue_once", tag)
    assert stage.props.runs(tag) == 2


def test_redelivered_while_it_runs(stage, tag):
    """A visibility timeout passes, or RabbitMQ loses the worker's connection."""
    first = stage.call("hold_late", tag)
    stage.wait_for_run(tag)

    stage.redeliver()
    stage.worker.wait_for_log(rf"{first.id}\]: another delivery or its predecessor is running", 60)

    stage.props.let_go(tag)
    stage.ends(first, "SUCCESS")
    stage.worker.wait_for_log(rf"dropped \S+\[{first.id}\]: it has already finished", 60)
    assert stage.props.runs(tag) == 1
    assert_free(stage, "hold_late", tag)


def test_killed_worker(stage, tag):
    """What it had not acknowledged runs once more, in another worker."""
    first = stage.call("hold_late", tag)
    stage.wait_for_run(tag)

    for worker in stage.workers:
        worker.kill()
    stage.start_worker()

    eventually(lambda: stage.props.runs(tag) == 2, timeout=90, message="it does not run again")
    assert_dropped(stage, "hold_late", tag, first)
    stage.props.let_go(tag, run=2)
    stage.ends(first, "SUCCESS")
    assert_free(stage, "hold_late", tag)
    assert stage.props.runs(tag) == 2


# -- ETA -------------------------------------------------------------------------------------------


def test_eta(stage, tag):
    """Beyond the visibility timeout of brokers that have one."""
    began = time.time()
    first = stage.call("succeed", tag, countdown=4)
    stage.check_delay()
    assert_dropped(stage, "succeed", tag, first)

    stage.wait_for_run(tag)

    assert time.time() - began >= 4
    stage.ends(first, "SUCCESS")
    assert_free(stage, "succeed", tag)
    assert stage.props.runs(tag) == 1
