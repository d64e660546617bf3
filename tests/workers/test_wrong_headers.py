"""Nothing that a message contains ends a worker: a header that cannot be read is reported once,
its task runs without a lock, and no other task suffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER
from tests.support import Worker, eventually
from tests.support.wrong_headers import READABLE, STRANGE_KEYS, UNREADABLE, changed
from tests.workers.apps.poisoned import BROKER_URL, STORE_URL, poisoned_app

pytestmark = pytest.mark.versions

StartWorker = Callable[..., Worker]
PATIENCE_S = 60.0


@pytest.fixture
def app(redis_url: str) -> Celery:
    return poisoned_app(redis_url, redis_url)


@pytest.fixture
def foreign(redis_url: str) -> Celery:
    """A producer without this library."""
    client = Celery("foreign", set_as_current=False)
    client.conf.update(broker_url=redis_url, result_backend=redis_url)
    return client


def start(start_worker: StartWorker, url: str, pool: str) -> Worker:
    return start_worker(
        "tests.workers.apps.poisoned", pool=pool, env={BROKER_URL: url, STORE_URL: url}
    )


def key(number: int) -> str:
    return f"1:{number:064x}"


def reports_of(worker: Worker, task_id: str) -> list[str]:
    return re.findall(rf"{re.escape(task_id)}\]: its header celery_unique cannot.*", worker.log())


def send(foreign: Celery, name: str, number: int, header: Any, **kwargs: Any) -> Any:
    task_id = f"{name}-{number}"
    return foreign.send_task(
        f"poisoned.{name}",
        (number,),
        kwargs,
        task_id=task_id,
        headers={HEADER: header(task_id, key(number))},
    )


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_header_that_cannot_be_read_is_reported_once_and_its_task_runs_without_a_lock(
    app, foreign, redis_url, start_worker, pool
):
    worker = start(start_worker, redis_url, pool)
    children = worker.children()
    names = ("run", "late")

    sent = {
        f"{name}: {variant}": send(foreign, name, number, header)
        for name in names
        for number, (variant, header) in enumerate(UNREADABLE.items())
    }
    locked = {variant: result.get(timeout=PATIENCE_S) for variant, result in sent.items()}

    assert len(UNREADABLE) >= 29
    assert [variant for variant, had_lock in locked.items() if had_lock] == []
    counts = {variant: len(reports_of(worker, result.id)) for variant, result in sent.items()}
    assert {variant: count for variant, count in counts.items() if count != 1} == {}
    # The worker is the same, and a unique task in it is unique.
    assert worker.is_running()
    assert worker.children() == children
    good = app.tasks["poisoned.run"].delay(1000)
    assert good.get(timeout=PATIENCE_S) is True
    store = state_of(app).store
    eventually(lambda: list(store.walk()) == [], timeout=PATIENCE_S)
    assert "Traceback" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_strange_header_that_can_be_read_is_as_any_other(
    app, foreign, redis_url, start_worker, pool
):
    worker = start(start_worker, redis_url, pool)
    headers = [*READABLE.values(), *(changed(key=strange) for strange in STRANGE_KEYS)]

    sent = [send(foreign, "run", number, header) for number, header in enumerate(headers)]
    locked = [result.get(timeout=PATIENCE_S) for result in sent]

    assert locked == [True] * len(headers)
    assert worker.is_running()
    store = state_of(app).store
    eventually(lambda: list(store.walk()) == [], timeout=PATIENCE_S)
    assert "Traceback" not in worker.log()
    assert "cannot be read" not in worker.log()


def test_a_retry_carries_a_header_that_cannot_be_read_and_is_not_its_own_duplicate(
    app, foreign, redis_url, start_worker
):
    """A newer release holds the key under this very id, in a header that this one cannot read."""
    worker = start(start_worker, redis_url, "prefork")
    first = app.tasks["poisoned.run"].apply_async((7, 2), task_id="run-7", unique=True, countdown=1)
    lock_key = first.unique_key
    app.control.purge()

    result = send(foreign, "run", 7, changed(key=lock_key, at="now"), retries=2)

    assert result.get(timeout=PATIENCE_S) is False
    assert len(reports_of(worker, "run-7")) == 3  # one for each message: the call and two retries


def test_a_message_of_an_unknown_task_with_such_a_header_is_reported_and_dropped(
    foreign, redis_url, start_worker
):
    worker = start(start_worker, redis_url, "solo")

    for number, header in enumerate(UNREADABLE.values()):
        send(foreign, "unknown", number, header)

    last = f"unknown-{len(UNREADABLE) - 1}"
    worker.wait_for_log(rf"{last}\]: its header celery_unique cannot", PATIENCE_S)
    assert worker.is_running()
    counts = [len(reports_of(worker, f"unknown-{n}")) for n in range(len(UNREADABLE))]
    assert counts == [1] * len(UNREADABLE)
