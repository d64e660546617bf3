"""The metrics of OpenTelemetry beside those of Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from celery import Celery
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from celery_unique.config.app_state import state_of
from celery_unique.contrib import opentelemetry, prometheus
from celery_unique.contrib._metrics import locks_in_store
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore
from tests.support.alerts import Scrape, read_exposition
from tests.support.app import make_app, value_of, working

#: Those that the exporter adds to every series.
OF_THE_EXPORTER = {
    "otel_scope_name",
    "otel_scope_version",
    "otel_scope_schema_url",
}


@pytest.fixture
def provider() -> Iterator[MeterProvider]:
    """It exports to Prometheus, in the default registry."""
    provider = MeterProvider([PrometheusMetricReader()])
    yield provider
    provider.shutdown()


def make_shop() -> tuple[Celery, threading.Event]:
    app, goes_on = make_app("memory://"), threading.Event()

    @app.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        assert goes_on.wait(60)
        return shop_id

    return app, goes_on


def scrape(registry: CollectorRegistry) -> Scrape:
    scraped = read_exposition(generate_latest(registry).decode())
    return {
        (name, frozenset(label for label in labels if label[0] not in OF_THE_EXPORTER)): figure
        for (name, labels), figure in scraped.items()
        if not name.endswith("_created")
    }


def test_they_have_the_names_labels_and_values_of_those_of_prometheus(provider):
    app, goes_on = make_shop()
    registry = CollectorRegistry()
    prometheus.install(app, registry=registry)
    registry.register(prometheus.Collector(lambda: prometheus.families(locks_in_store(app))))
    opentelemetry.install(
        app, tracer_provider=TracerProvider(), meter_provider=provider, locks=10_000
    )
    rebuild = app.tasks["rebuild"]
    for shop_id in (7, 7, 8):
        rebuild.delay(shop_id)
    waiting = rebuild.apply_async((9,), countdown=600)
    rebuild.apply_async((9,), unique_on_conflict="replace", countdown=600)
    with working(app, pool="threads"):
        goes_on.set()
        value_of(rebuild.delay(8))
        value_of(rebuild.delay(7))
        measured, expected = scrape(REGISTRY), scrape(registry)
    assert waiting.outcome == "created"

    class Silent(MemoryStore):
        def acquire(self, *_: object) -> None:
            raise StoreUnavailable("no answer")

    state_of(app).use_store(Silent())
    with pytest.raises(StoreUnavailable):
        rebuild.delay(7)

    known = {series: figure for series, figure in expected.items() if figure}
    # Durations differ, and so do readings that one of the two makes.
    same = {
        series: figure
        for series, figure in known.items()
        if "store_seconds" not in series[0] and "oldest" not in series[0]
    }
    assert {series: measured.get(series) for series in same} == same
    assert {name for name, _ in known} <= {name for name, _ in measured}
    counted = ("celery_unique_store_seconds_count", frozenset({("act", "acquire")}))
    assert measured[counted] == expected[counted]
    buckets = {series for series in expected if series[0] == "celery_unique_store_seconds_bucket"}
    assert {s for s in measured if s[0] == "celery_unique_store_seconds_bucket"} <= buckets
    errors = ("celery_unique_store_errors_total", frozenset({("act", "acquire")}))
    assert scrape(REGISTRY)[errors] == 1


def test_without_a_provider_nothing_is_added_to_the_record():
    app, _ = make_shop()
    opentelemetry.install(app)

    result = app.tasks["rebuild"].delay(7)

    record, _ = state_of(app).store.read(result.unique_key)
    assert record.tasks[result.id].trace == ""
    assert app.tasks["rebuild"].delay(7).deduplicated


def test_installing_twice_counts_once(provider):
    app, _ = make_shop()
    for _ in range(2):
        opentelemetry.install(app, meter_provider=provider)

    app.tasks["rebuild"].delay(7)

    acquired = ("celery_unique_acquired_total", frozenset({("task", "rebuild")}))
    assert scrape(REGISTRY)[acquired] == 1
