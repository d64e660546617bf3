"""Tasks of a worker that another library instruments, each with the trace that it runs in.

``TRACED_TOOL`` names the library, ``TRACED_REDIS`` is the broker, the result backend and the lock
store. Nothing that a library collects leaves the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, chain, chord

from tests.support.app import make_app
from tests.support.props import Props

#: The current trace, as the library knows it.
TraceId = Callable[[], str]

#: What an instrumented body calls, each under a tag of its own; the first five retry once.
RETRIED = ("self", "auto", "chain", "member1", "member2")
ENDS = ("link", "chain-end", "chord-end")


def traced_app(redis_url: str, trace_id: TraceId = str, **conf: Any) -> Celery:
    app = make_app(name="traced", broker=redis_url, backend=redis_url, **conf)
    app.props = props = Props(redis_url)

    def enter(self: Task, tag: str) -> int:
        facts = {
            "id": self.request.id,
            "trace": trace_id(),
            "held": self.request.unique is not None,
        }
        return int(props.redis.rpush(f"traced:{tag}", json.dumps(facts)))

    @app.task(name="retry_self", bind=True, unique=True, shared=False)
    def retry_self(self: Task, tag: str) -> str:
        if enter(self, tag) == 1:
            raise self.retry(countdown=0)
        props.wait_for_word(tag)
        return tag

    @app.task(
        name="retry_auto",
        bind=True,
        unique=True,
        shared=False,
        autoretry_for=(ConnectionError,),
        retry_kwargs={"countdown": 0},
    )
    def retry_auto(self: Task, tag: str) -> str:
        if enter(self, tag) == 1:
            raise ConnectionError(tag)
        props.wait_for_word(tag)
        return tag

    @app.task(name="end", bind=True, unique=True, shared=False)
    def end(self: Task, tag: str) -> str:
        enter(self, tag)
        return tag

    @app.task(name="play", bind=True, shared=False, ignore_result=True)
    def play(self: Task, tag: str) -> None:
        """Every call is made here, by an instrumented process and inside its trace."""
        enter(self, tag)
        for _ in range(2):
            props.redis.rpush(f"outcomes:{tag}", retry_self.delay(f"{tag}-self").outcome)
        retry_auto.apply_async((f"{tag}-auto",), link=end.si(f"{tag}-link"))
        chain(retry_self.si(f"{tag}-chain"), end.si(f"{tag}-chain-end")).delay()
        members = [retry_auto.si(f"{tag}-member1"), retry_self.si(f"{tag}-member2")]
        chord(members, end.si(f"{tag}-chord-end")).delay()

    # Every second a tick, of which the first retries and then waits for a word.
    app.conf.beat_schedule = {"tick": {"task": "retry_self", "schedule": 1, "args": ["tick"]}}
    return app


# -- the libraries ---------------------------------------------------------------------------


def sentry() -> TraceId:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None: ...

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        transport=Nowhere,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration(monitor_beat_tasks=True)],
    )
    return lambda: str(sentry_sdk.get_current_span().trace_id)  # type: ignore[union-attr]


def opentelemetry() -> TraceId:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()
    return lambda: format(trace.get_current_span().get_span_context().trace_id, "032x")


def datadog() -> TraceId:
    import ddtrace
    from ddtrace.trace import tracer

    ddtrace.patch(celery=True)
    # Of each process: a child has another span than the one that was forked.
    return lambda: str(tracer.current_span().trace_id)  # type: ignore[union-attr]


def elastic() -> TraceId:
    import elasticapm
    from elasticapm.contrib.celery import register_exception_tracking, register_instrumentation
    from elasticapm.traces import execution_context

    client = elasticapm.Client(
        service_name="traced",
        server_url="http://127.0.0.1:9",
        disable_send=True,
        central_config=False,
        cloud_provider="none",
        metrics_interval="0s",
    )
    register_exception_tracking(client)
    register_instrumentation(client)
    return lambda: str(execution_context.get_transaction().trace_parent.trace_id)


def newrelic() -> TraceId:
    """Instrumented by ``newrelic-admin``, that is before Celery is imported."""
    from newrelic.agent import current_trace_id

    return lambda: str(current_trace_id())


#: Environment variables of a library: no agent, no telemetry, and nothing that calls out.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "datadog": {
        "DD_CELERY_DISTRIBUTED_TRACING": "true",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "DD_CRASHTRACKING_ENABLED": "false",
    },
    "newrelic": {"NEW_RELIC_DEVELOPER_MODE": "true", "NEW_RELIC_APP_NAME": "traced"},
}
TOOLS: dict[str, Callable[[], TraceId]] = {
    "sentry": sentry,
    "opentelemetry": opentelemetry,
    "datadog": datadog,
    "elastic": elastic,
    "newrelic": newrelic,
}

if "TRACED_TOOL" in os.environ:
    app = traced_app(os.environ["TRACED_REDIS"], TOOLS[os.environ["TRACED_TOOL"]]())
