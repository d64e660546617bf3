"""Tasks of a worker and beat that report to OpenTelemetry or Sentry, with this library's
integration.

``REPORTED_REDIS`` is the broker, the result backend and the lock store, and gets the spans of
OpenTelemetry. ``REPORTED_TOOL`` is ``opentelemetry``, ``opentelemetry first`` (instrumented before
the integration is installed) or the DSN of Sentry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import redis
from celery import Celery
from celery.schedules import schedstate, schedule

from tests.support.app import make_app
from tests.support.props import Props


class Hurried(schedule):
    """Of a minute, the shortest that Sentry monitors, and due every second."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        elapsed = (self.now() - self.maybe_make_aware(last_run_at)).total_seconds()
        return schedstate(is_due=elapsed >= 1, next=0.2)


def reported_app(redis_url: str, **conf: Any) -> Celery:
    app = make_app(name="reported", broker=redis_url, backend=redis_url, **conf)
    app.props = props = Props(redis_url)

    @app.task(name="shop.rebuild", unique=True, unique_label="shop {shop_id}", shared=False)
    def rebuild(shop_id: str) -> str:
        props.enter(shop_id)
        props.wait_for_word(shop_id)
        return shop_id

    @app.task(name="shop.retry", bind=True, unique=True, shared=False)
    def retry(self: Any, shop_id: str) -> None:
        if not self.request.retries:
            raise self.retry(countdown=0)

    @app.task(name="shop.call", shared=False)
    def call(shop_id: str) -> str:
        outcome: str = rebuild.delay(shop_id).outcome
        return outcome

    return app


def spans_to_redis(redis_url: str) -> Any:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    client = redis.Redis.from_url(redis_url)

    class ToRedis(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            client.rpush("spans", *(span.to_json(indent=None) for span in spans))
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToRedis()))
    return provider


def _instrument(app: Celery, tool: str) -> None:
    if tool.startswith("opentelemetry"):
        from opentelemetry import trace
        from opentelemetry.instrumentation.celery import CeleryInstrumentor

        from celery_unique.contrib import opentelemetry

        if tool == "opentelemetry first":
            CeleryInstrumentor().instrument()
        opentelemetry.install(app)
        if tool == "opentelemetry":
            CeleryInstrumentor().instrument()
        trace.set_tracer_provider(spans_to_redis(os.environ["REPORTED_REDIS"]))
    else:
        import sentry_sdk
        from sentry_sdk.integrations.celery import CeleryIntegration

        from celery_unique.contrib import sentry

        integration = CeleryIntegration(monitor_beat_tasks=True)
        sentry_sdk.init(dsn=tool, traces_sample_rate=1.0, integrations=[integration])
        sentry.install(app)
        app.conf.beat_schedule = {
            "nightly": {"task": "shop.rebuild", "schedule": Hurried(60), "args": ["beat"]}
        }


if "REPORTED_REDIS" in os.environ:
    app = reported_app(os.environ["REPORTED_REDIS"])
    _instrument(app, os.environ["REPORTED_TOOL"])
