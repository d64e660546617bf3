"""Spans of calls and runs in the real SDK, across a caller and a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import celery_unique
from celery_unique.contrib import opentelemetry
from tests.support import Worker, eventually
from tests.workers.apps.reported import reported_app

pytestmark = pytest.mark.slow


class Reported:
    """A caller that is traced, and what it and its worker have exported."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        CeleryInstrumentor().instrument(tracer_provider=provider)
        opentelemetry.install(app, tracer_provider=provider)

    def calls(self) -> list[ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if span.name.startswith("unique ")]

    def in_worker(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        def exported() -> list[dict[str, Any]] | None:
            spans = map(json.loads, self.app.props.redis.lrange("spans", 0, -1))
            found = [span for span in spans if span["name"] == name]
            return found if len(found) >= number else None

        return eventually(exported, timeout=60, message=f"no span {name} in the worker")


@pytest.fixture(params=["opentelemetry", "opentelemetry first"])
def reported(request: Any, redis_url: str, start_worker: Any) -> Iterator[Reported]:
    env = {"REPORTED_REDIS": redis_url, "REPORTED_TOOL": request.param}
    worker: Worker = start_worker("tests.workers.apps.reported", concurrency=2, env=env)
    assert worker is not None
    app = reported_app(redis_url)
    try:
        yield Reported(app)
    finally:
        CeleryInstrumentor().uninstrument()
        app.close()


def facts(span: Any) -> dict[str, Any]:
    attributes = span["attributes"] if isinstance(span, dict) else span.attributes
    prefix = opentelemetry.ATTRIBUTE
    return {
        name.removeprefix(prefix): value
        for name, value in attributes.items()
        if name.startswith(prefix)
    }


def test_a_duplicate_is_a_span_with_a_link_to_the_call_of_its_holder(reported, tag):
    rebuild = reported.app.tasks["shop.rebuild"]
    first = rebuild.delay(tag)
    eventually(lambda: reported.app.props.runs(tag) == 1, timeout=60)

    again = rebuild.delay(tag)
    with pytest.raises(celery_unique.DuplicateTask):
        rebuild.apply_async((tag,), unique_on_conflict="reject")
    [many] = celery_unique.apply_many([rebuild.s(tag)])
    reported.app.props.let_go(tag)
    first.get(timeout=60)

    created, dropped, rejected, in_batch = reported.calls()
    assert again.deduplicated
    assert many.deduplicated
    key = first.unique_key
    common = {"task": "shop.rebuild", "key": facts(created)["key"]}
    assert key.startswith(common["key"])
    assert len(common["key"]) < 20
    holder = {"holder_id": first.id, "holder_state": "active", **common}
    ignored = {"outcome": "deduplicated", "task_id": first.id, "on_conflict": "ignore", **holder}
    assert facts(created) == {
        **common, "outcome": "created", "task_id": first.id, "on_conflict": "ignore"
    }  # fmt: skip
    assert facts(dropped) == facts(in_batch) == ignored
    assert facts(rejected) == {**holder, "outcome": "rejected", "on_conflict": "reject"}
    for span in (dropped, rejected, in_batch):
        [link] = span.links
        assert (link.context.trace_id, link.context.span_id) == (
            created.context.trace_id,
            created.context.span_id,
        )
    # The message continues the trace of the call, and its run has the facts of the lock.
    [run] = reported.in_worker("run/shop.rebuild")
    assert int(run["context"]["trace_id"], 16) == created.context.trace_id
    assert facts(run) == {"key": common["key"], "outcome": "created", "end": "completed"}
    everything = json.dumps(run) + "".join(
        span.to_json() for span in reported.exporter.get_finished_spans()
    )
    assert key not in everything
    assert key.partition(":")[2] not in everything


def test_every_run_of_a_task_that_retries_has_its_key(reported, tag):
    result = reported.app.tasks["shop.retry"].delay(tag)
    result.get(timeout=60)

    first, last = reported.in_worker("run/shop.retry", 2)

    [call] = reported.calls()
    assert facts(first)["key"] == facts(last)["key"] == facts(call)["key"]
    assert "end" not in facts(first)
    assert facts(last)["end"] == "completed"


def test_a_label_and_a_trace_are_in_one_record(reported, tag):
    task = reported.app.tasks["shop.rebuild"]
    task.apply_async((tag,), countdown=600)

    lock = celery_unique.lookup(task, (tag,), app=reported.app)

    assert lock is not None
    assert lock.label == f"shop {tag}"
