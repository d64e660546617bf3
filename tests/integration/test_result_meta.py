"""What the result backend keeps of a unique task, and who can read it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import celery
import pytest
from celery import Celery

import celery_unique
from celery_unique.publish import stored_meta
from celery_unique.publish.results import UniqueResult
from celery_unique.publish.stored_meta import StoredUnique
from tests.support.app import make_app, plain_app, value_of, working

#: Up to 5.6 Celery's table has no column for it.
DATABASE_KEEPS = celery.VERSION[:2] >= (5, 7)

pytestmark = pytest.mark.versions


BACKENDS = [
    "cache",
    "file",
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.server),
    pytest.param("redis", marks=pytest.mark.server),
]


@dataclass
class Story:
    """One worker has run everything, and what is left is read by ids alone."""

    app: Celery
    done: Called
    failed: Called
    old: Called
    old_before_the_worker: StoredUnique | None
    new: Called
    plain: Called

    def stored(self, called: Called) -> StoredUnique | None:
        fresh = self.app.AsyncResult(called.id)
        assert isinstance(fresh, UniqueResult)
        return fresh.unique

    def expected(self, key: str, *facts: Any, **named: Any) -> StoredUnique | None:
        is_database = self.app.conf.result_backend.startswith("db+")
        kept = DATABASE_KEEPS or not is_database
        return StoredUnique(key[:14], *facts, **named) if kept else None


class Called(NamedTuple):
    id: str
    key: str | None


def backend_url(request: pytest.FixtureRequest, kind: str, directory: Path) -> str:
    if kind == "cache":
        return "cache+memory://"
    if kind == "file":
        return directory.as_uri()
    if kind == "sqlite":
        return f"db+sqlite:///{directory / 'results.sqlite3'}"
    url = str(request.getfixturevalue(f"{kind}_server").fresh_url())
    return f"db+{url}" if kind == "postgres" else url


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return backend_url(request, request.param, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "extended"])
def story(request: pytest.FixtureRequest, backend: str) -> Iterator[Story]:
    app = make_app("memory://", result_backend=backend, result_extended=request.param)

    @app.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        return shop_id * 2

    @app.task(name="refuse", unique=True, shared=False, throws=(ValueError,))
    def refuse(shop_id: int) -> None:
        raise ValueError(shop_id)

    @app.task(name="debounced", unique=True, unique_on_conflict="replace", shared=False)
    def debounced(shop_id: int) -> int:
        return shop_id

    @app.task(name="plain", shared=False)
    def plain(shop_id: int) -> int:
        return shop_id

    results = [task.delay(7) for task in (rebuild, refuse, debounced, debounced, plain)]
    for _ in range(3):
        rebuild.delay(7)
    called = [Called(result.id, result.unique_key) for result in results]
    before = app.AsyncResult(called[2].id).unique
    with working(app):
        for result in results:
            result.get(timeout=20, propagate=False, interval=0.01)
    done, failed, old, new, plain_one = called
    del result, results
    yield Story(app, done, failed, old, before, new, plain_one)
    gc.collect()  # results unsubscribe when they go, which needs the server
    app.close()


def test_a_finished_task_tells_key_outcome_and_duplicates(story):
    assert story.stored(story.done) == story.expected(story.done.key, "created", 3)


def test_a_failed_task_tells_them_too(story):
    assert story.stored(story.failed) == story.expected(story.failed.key, "created", 0)


def test_a_superseded_task_tells_what_took_its_place_before_a_worker_has_seen_it(story):
    superseded = story.expected(story.old.key, superseded_by=story.new.id)

    assert story.app.AsyncResult(story.old.id).state == "REVOKED"
    assert story.old_before_the_worker == superseded
    assert story.stored(story.old) == superseded
    assert story.stored(story.new) == story.expected(story.new.key, "replaced", 0)


def test_a_task_that_is_not_unique_tells_nothing(story):
    assert story.app.AsyncResult(story.plain.id).state == "SUCCESS"
    assert story.stored(story.plain) is None


def test_nothing_is_stored_of_an_id_that_nobody_knows(story):
    assert story.stored(Called("nobody", None)) is None


@pytest.mark.parametrize("extended", [False, True])
def test_an_app_without_the_library_reads_the_result_as_ever(story, extended):
    url = story.app.conf.result_backend
    other = plain_app(result_backend=url, result_extended=extended)
    if url.startswith("cache"):
        other.backend.client = story.app.backend.client

    done, failed = other.AsyncResult(story.done.id), other.AsyncResult(story.failed.id)

    assert (done.state, done.get(timeout=10), done.traceback) == ("SUCCESS", 14, None)
    assert failed.state == "FAILURE"
    assert isinstance(failed.result, ValueError)
    assert not hasattr(done, "unique")
    other.close()


def test_facts_of_a_newer_release_are_left_out():
    meta = {"celery_unique": {"key": "1:abc", "outcome": "created", "colour": "red"}}

    assert stored_meta.read(meta) == StoredUnique("1:abc")
    assert stored_meta.read({"celery_unique": "what is this"}) is None
    assert stored_meta.read({}) is None


def test_an_eager_result_has_nothing_stored(local_app):
    @local_app.task(unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        return shop_id

    assert rebuild.apply((7,)).unique is None


def test_a_backend_that_was_there_before_the_installation_keeps_them_too(tmp_path):
    app = plain_app(result_backend=tmp_path.as_uri())
    assert app.backend is not None
    celery_unique.install(app, store_url="memory://")

    @app.task(unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        return shop_id

    result = rebuild.delay(7)
    with working(app):
        value_of(result)

    assert result.unique == StoredUnique(result.unique_key[:14], "created", 0)


def test_without_a_result_backend_nothing_is_stored_of_a_task():
    app = Celery("no-results", broker="memory://", set_as_current=False)
    celery_unique.install(app)

    @app.task(name="no.results", unique=True)
    def task() -> None: ...

    try:
        assert task.delay().unique is None
        assert app.AsyncResult("any").unique is None
    finally:
        app.close()
