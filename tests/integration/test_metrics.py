"""What the metrics of a process count that calls tasks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.contrib import _metrics, prometheus
from celery_unique.contrib._metrics import MOST_KEYS, WALK_S, locks_in_store
from celery_unique.contrib.prometheus import families
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore
from tests.support.alerts import promtool
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


# -- the gauges of all locks ---------------------------------------------------------------


def gauges(app: Celery, most_keys: int = MOST_KEYS) -> dict[str, float]:
    found = locks_in_store(app, most_keys)
    return {gauge.labels[0] if gauge.labels else gauge.name: gauge.value for gauge in found}


def test_locks_are_counted_by_state_with_the_longest_wait(app):
    rebuild = app.tasks["rebuild"]
    idle = {"waiting": 0, "scheduled": 0, "active": 0, "ended": 0, "parked": 0}
    idle |= {"stale_locks": 0, "oldest_waiting_seconds": 0, "locks_truncated": 0}
    assert gauges(app) == idle

    rebuild.delay(1)
    advance(app, 3000)
    rebuild.delay(2)
    rebuild.apply_async((3,), countdown=7200)
    advance(app, 700)

    found = gauges(app)
    assert 3700 <= found.pop("oldest_waiting_seconds") < 3800
    assert found == {**found, "waiting": 2, "scheduled": 1, "stale_locks": 1, "active": 0}
    advance(app, 7000)
    assert gauges(app)["scheduled"] == 0
    assert gauges(app)["stale_locks"] == 2, "the third has been due for some minutes"


def test_parked_calls_are_counted(app):
    for _ in range(3):
        app.tasks["rebuild"].apply_async((7,), unique_on_conflict="queue")

    assert (gauges(app)["waiting"], gauges(app)["parked"]) == (1, 2)


def test_a_scrape_counts_no_more_keys_than_it_may_and_reports_that(app, monkeypatch):
    monkeypatch.setattr(_metrics, "WALK_S", 60)
    for number in range(30):
        app.tasks["rebuild"].delay(number)

    assert (gauges(app, 30)["waiting"], gauges(app, 30)["locks_truncated"]) == (30, 0)
    assert (gauges(app, 20)["waiting"], gauges(app, 20)["locks_truncated"]) == (20, 1)


def test_a_scrape_of_a_large_store_takes_no_longer_than_it_may(app):
    class Endless(MemoryStore):
        """Finds a lock now and then, as in a database of other keys."""

        def walk(self, batch: int = 500, stop_at: float = float("inf")) -> Iterator[object]:
            while time.monotonic() < stop_at:
                time.sleep(0.01)
            yield from super().walk(batch, stop_at)

    state_of(app).use_store(Endless())
    app.tasks["rebuild"].delay(1)
    began = time.monotonic()

    assert gauges(app)["locks_truncated"] == 1
    assert time.monotonic() - began < WALK_S + 1


def test_a_store_that_does_not_answer_leaves_the_gauges_out(app):
    class Silent(MemoryStore):
        def read(self, *_: object) -> None:
            raise StoreUnavailable("no answer")

    state_of(app).use_store(Silent())

    assert gauges(app) == {}


def test_the_names_follow_the_conventions_of_prometheus(app, registry):
    app.tasks["rebuild"].delay(7)
    registry.register(prometheus.Collector(lambda: families(locks_in_store(app))))

    scraped = generate_latest(registry)
    done = subprocess.run([promtool(), "check", "metrics"], input=scraped, capture_output=True)

    assert b"celery_unique_oldest_waiting_seconds" in scraped
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    wrong = b"# TYPE celery_unique_wrong counter\ncelery_unique_wrong 1\n"
    done = subprocess.run([promtool(), "check", "metrics"], input=wrong, capture_output=True)
    assert done.returncode != 0
