"""What the metrics of a process count that calls tasks."""

from __future__ import annotations

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.contrib import prometheus
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore
from tests.support.app import advance, make_app, plain_app, value_of, working


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def app(registry: CollectorRegistry) -> Celery:
    app = make_app("memory://")
    prometheus.install(app, registry=registry)

    @app.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        return shop_id

    return app


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"celery_unique_{name}", labels) or 0.0


def test_calls_are_counted_by_what_became_of_them(app, registry):
    rebuild = app.tasks["rebuild"]

    rebuild.delay(7)
    rebuild.delay(7)
    with pytest.raises(celery_unique.DuplicateTask):
        rebuild.apply_async((7,), unique_on_conflict="reject")
    rebuild.apply_async((7,), unique_on_conflict="replace")

    assert value(registry, "acquired_total", task="rebuild") == 2
    assert value(registry, "conflicts_total", task="rebuild", on_conflict="ignore") == 1
    assert value(registry, "conflicts_total", task="rebuild", on_conflict="reject") == 1
    assert value(registry, "superseded_total", task="rebuild") == 1
    assert value(registry, "store_seconds_count", act="acquire") == 4


def test_ends_and_lost_locks_are_counted(app, registry):
    rebuild = app.tasks["rebuild"]
    lapsed = rebuild.delay(7)
    advance(app, 10 * 86_400)
    ended = rebuild.delay(8)

    with working(app):
        value_of(lapsed)
        value_of(ended)

    assert value(registry, "lost_total", task="rebuild") == 1
    assert value(registry, "released_total", task="rebuild", reason="completed") == 2


def test_a_key_released_by_hand_is_counted_as_such(app, registry):
    app.tasks["rebuild"].delay(7)

    assert celery_unique.release("rebuild", (7,), app=app)

    assert value(registry, "released_total", task="rebuild", reason="released manually") == 1


def test_a_store_that_does_not_answer_is_counted(app, registry):
    class Silent(MemoryStore):
        def acquire(self, *_: object) -> None:
            raise StoreUnavailable("no answer")

    state_of(app).use_store(Silent())

    with pytest.raises(StoreUnavailable):
        app.tasks["rebuild"].delay(7)

    assert value(registry, "store_errors_total", act="acquire") == 1
    assert value(registry, "store_seconds_count", act="acquire") == 1


def test_installing_twice_counts_once(app, registry):
    prometheus.install(app, registry=registry)

    app.tasks["rebuild"].delay(7)

    assert value(registry, "acquired_total", task="rebuild") == 1
    assert value(registry, "store_seconds_count", act="acquire") == 1


def test_a_store_that_is_open_already_is_timed_too(registry):
    app = make_app("memory://")
    store = state_of(app).store

    prometheus.install(app, registry=registry)
    store.read("1:abc")

    assert value(registry, "store_seconds_count", act="read") == 1


def test_the_locks_of_another_app_are_not_counted(app, registry):
    other = make_app("memory://")

    @other.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(7)

    assert value(registry, "acquired_total", task="rebuild") == 0


def test_an_app_without_the_library_is_told_to_install_it(registry):
    with pytest.raises(celery_unique.ConfigurationError, match=r"celery_unique\.install"):
        prometheus.install(plain_app(), registry=registry)
