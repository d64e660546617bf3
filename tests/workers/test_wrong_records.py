"""Records that cannot be read, met by real workers and callers: tasks run, each key is reported
once, other keys are as before, and an operator frees the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique.cli import main
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import UnreadableRecord
from celery_unique.operations.doctor.report import examine
from celery_unique.stores.circuit_breaker import FAILURES_TO_OPEN
from tests.support import Worker, eventually
from tests.support.wrong_records import variants_for
from tests.workers.apps.poisoned import BROKER_URL, STORE_URL, poisoned_app

pytestmark = pytest.mark.server

StartWorker = Callable[..., Worker]
PATIENCE_S = 60.0

STORES = [
    pytest.param("redis_url", "prefork", id="redis-prefork"),
    pytest.param("redis_url", "solo", id="redis-solo"),
    pytest.param("sqlite_url", "threads", id="sqlite-threads"),
    pytest.param("postgres_url", "prefork", id="postgres-prefork"),
    pytest.param("mariadb_url", "prefork", id="mariadb-prefork"),
]


@pytest.mark.parametrize(("store_url", "pool"), STORES)
def test_a_worker_runs_their_tasks_reports_each_key_once_and_renews_the_others(
    request, redis_url, start_worker, store_url, pool
):
    url = request.getfixturevalue(store_url)
    app = poisoned_app(redis_url, url)
    store: Any = state_of(app).store
    run = app.tasks["poisoned.run"]
    sent: dict[str, Any] = {}
    unreadable: dict[str, Any] = {}
    for number, (variant, break_) in enumerate(variants_for(store).items()):
        sent[variant] = run.apply_async((number,))
        break_(store, sent[variant].unique_key, sent[variant].id)
    for variant, result in sent.items():
        try:
            store.read(result.unique_key)
        except UnreadableRecord:
            unreadable[variant] = result

    worker = start_worker(
        "tests.workers.apps.poisoned", pool=pool, env={BROKER_URL: redis_url, STORE_URL: url}
    )
    for result in sent.values():
        result.get(timeout=PATIENCE_S)

    assert len(unreadable) >= 20
    log = worker.log()
    counts = {
        variant: len(re.findall(rf"key {re.escape(result.unique_key[:14])} cannot be read", log))
        for variant, result in unreadable.items()
    }
    # What only Python is strict about, a script of Redis may have started as any other.
    assert {variant: count for variant, count in counts.items() if count > 1} == {}
    assert sum(counts.values()) >= (20 if store_url != "redis_url" else 15)
    assert worker.is_running()
    assert "Traceback" not in log
    good = run.delay(1000)
    assert good.get(timeout=PATIENCE_S) is True
    eventually(lambda: celery_unique.lookup(run, (1000,)) is None, timeout=PATIENCE_S)


@pytest.fixture
def app(redis_url: str) -> Celery:
    return poisoned_app(redis_url, redis_url)


def broken_key(app: Celery, number: int) -> str:
    store: Any = state_of(app).store
    first = app.tasks["poisoned.run"].apply_async((number,))
    variants_for(store)["a task: not JSON"](store, first.unique_key, first.id)
    return str(first.unique_key)


def test_a_call_raises_that_and_calls_of_other_keys_go_on(app):
    run = app.tasks["poisoned.run"]
    key = broken_key(app, 1)

    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(UnreadableRecord) as caught:
            run.delay(1)
        assert caught.value.key == key
    assert run.delay(2).outcome == "created"


def test_a_call_is_published_where_that_is_wanted_and_a_batch_makes_the_others(redis_url):
    app = poisoned_app(redis_url, redis_url, unique_on_store_error="publish")
    run = app.tasks["poisoned.run"]
    broken_key(app, 1)

    assert run.delay(1).outcome == "bypassed"
    made = celery_unique.apply_many([run.s(1), run.s(2), run.s(1), run.s(3)])

    assert [result.outcome for result in made] == ["bypassed", "created", "bypassed", "created"]


def test_an_operator_sees_and_frees_the_key(app, capsys):
    runtime = state_of(app)
    key = broken_key(app, 1)
    other = app.tasks["poisoned.run"].delay(2)
    runtime.store.flush()  # it is confirmed in the background

    def run(*argv: str) -> list[Any]:
        capsys.readouterr()
        assert main(app, argv, "celery unique") == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert {(row["key"], row["state"]) for row in run("list", "--json")} == {
        (key, "unreadable"),
        (other.unique_key, "available"),
    }
    assert [row["key"] for row in run("list", "--state", "unreadable", "--json")] == [key]
    [counts] = run("stats", "--json")
    assert counts["states"]["unreadable"] == 1
    findings = [each for each in examine(runtime).findings if each.check == "records"]
    assert [each.level for each in findings] == ["error"]

    # The command that the error shows.
    [released] = run("release", key[:14], "--yes", "--json")

    assert released["released"] == 1
    assert app.tasks["poisoned.run"].delay(1).outcome == "created"
    assert celery_unique.lookup(key=other.unique_key, app=app) is not None


def test_release_by_the_library_s_function_deletes_it(app):
    run = app.tasks["poisoned.run"]
    broken_key(app, 1)

    assert celery_unique.release(run, (1,))

    assert run.delay(1).outcome == "created"
