"""Spans and metrics for OpenTelemetry.

One line beside ``celery_unique.install(app)``::

    celery_unique.contrib.opentelemetry.install(app)

A unique call is a span, with a link to the call of the holder where it is a duplicate. The span of
a run, which opentelemetry-instrumentation-celery makes, gets the facts of its lock. Events are
counted by the names of :mod:`celery_unique.contrib.prometheus`.
"""

# A link needs the trace context of the call that became the holder, and a duplicate knows nothing
# of that call but its record: so that keeps the context, behind the label, for calls that are
# traced. It takes about 90 bytes there, and a duplicate that is traced reads the record again.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from celery import signals as celery_signals

import celery_unique
from celery_unique import reporting
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import (
    ConfigurationError,
    DuplicateTask,
    StoreUnavailable,
    install_command,
)
from celery_unique.header import HEADER, LockHeader
from celery_unique.keys.digest import short_key
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.publish.request import PublishRequest
from celery_unique.stores.record import TRACED

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise ConfigurationError(
        "celery_unique.contrib.opentelemetry needs opentelemetry-api: "
        f"{install_command('opentelemetry')}",
        setting=None,
    ) from None

#: Attributes of spans begin with this. The key is never one of them, only its beginning.
ATTRIBUTE = "celery_unique."

#: The call in this context that has its span.
_in_span: ContextVar[PublishRequest | None] = ContextVar("in_span", default=None)
_installed: weakref.WeakSet[Any] = weakref.WeakSet()


def install(
    app: Any,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    locks: int = 0,
) -> None:
    """Trace the unique calls of ``app``, and count the events of its locks.

    The providers are the global ones by default, which may be set later, as in
    ``worker_process_init``. With ``locks``, every process that collects metrics reports the locks
    of the store, of which it counts as many at most. Idempotent; does not connect.
    """
    app_state = state_of(app)  # raises where the library is not installed
    if app in _installed:
        return
    _installed.add(app)
    version = celery_unique.__version__
    spans = _Spans(app, trace.get_tracer("celery_unique", version, tracer_provider))
    app_state.watch_parts(spans.watch)
    for signal, receiver in (
        # The span of a run begins and ends at these two, before or after us.
        (celery_signals.task_prerun, spans.on_run),
        (celery_signals.task_postrun, spans.on_run),
        (reporting.unique_released, partial(spans.on_end, "end")),
        (reporting.unique_lost, partial(spans.on_end, "lost")),
    ):
        signal.connect(receiver, weak=False, dispatch_uid=object())
    from ._opentelemetry_metrics import measure

    measure(app, metrics.get_meter("celery_unique", version, meter_provider), locks)


# -- spans ---------------------------------------------------------------------------------------


class _Spans:
    def __init__(self, app: Any, tracer: trace.Tracer) -> None:
        self._app = app
        self._tracer = tracer

    def watch(self, part: Any) -> None:
        """Trace the calls of a coordinator. A call of ``apply_many`` has a span if it is a
        duplicate."""
        if isinstance(part, UniqueTaskCoordinator):
            watched: Any = part
            watched.publish = partial(self._call, part, part.publish)
            watched.settle_conflict = partial(self._call, part, part.settle_conflict)
            watched.before_batch = _add_trace

    def _call(
        self,
        coordinator: UniqueTaskCoordinator,
        publish: Callable[..., Any],
        request: PublishRequest,
        *more: Any,
    ) -> Any:
        if _in_span.get() is request:
            return publish(request, *more)
        facts = {
            "task": request.task_name,
            "key": short_key(request.key),
            "on_conflict": request.dry_run or request.policy.on_conflict,
        }
        name = f"unique {request.task_name}"
        with self._tracer.start_as_current_span(
            name,
            attributes=_attributes(facts),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            if not more:
                _add_trace([request])
            token = _in_span.set(request)
            try:
                outcome = publish(request, *more)
            except DuplicateTask as error:
                span.set_attributes(_attributes({"outcome": "rejected"}))
                self._link(coordinator, request, span, error.task_id, error.state)
                raise
            except Exception as error:
                span.record_exception(error)
                span.set_status(trace.StatusCode.ERROR, type(error).__name__)
                raise
            finally:
                _in_span.reset(token)
            if outcome is not None:
                facts = {"outcome": outcome.facts.outcome, "task_id": outcome.task_id}
                span.set_attributes(_attributes(facts))
                if outcome.facts.holder_state is not None:
                    holder = outcome.follows or outcome.task_id
                    self._link(coordinator, request, span, holder, outcome.facts.holder_state)
            return outcome

    def _link(
        self,
        coordinator: UniqueTaskCoordinator,
        request: PublishRequest,
        span: trace.Span,
        holder_id: str | None,
        state: str | None,
    ) -> None:
        """Link the span of a duplicate to that of the call which its holder comes from."""
        if holder_id is None or not span.is_recording():  # concealed, or sampled out
            return
        span.set_attributes(_attributes({"holder_id": holder_id, "holder_state": state or ""}))
        with suppress(StoreUnavailable):
            record, _ = coordinator.store.read(request.key)
            holder = record.tasks.get(holder_id)
            if holder is not None and holder.trace:
                context = TraceContextTextMapPropagator().extract({"traceparent": holder.trace})
                span.add_link(trace.get_current_span(context).get_span_context())

    def on_run(self, task: Any = None, **_: Any) -> None:
        span = trace.get_current_span()
        if task is None or task.app is not self._app or not span.is_recording():
            return
        header = LockHeader.from_message(getattr(task.request, HEADER, None))
        if header is not None:
            facts = {"key": short_key(header.key), "outcome": header.outcome or "created"}
            span.set_attributes(_attributes(facts))

    def on_end(
        self, fact: str, app: Any = None, task_id: str = "", reason: str = "", **_: Any
    ) -> None:
        """In the process that runs the task, its span is the current one."""
        task = self._app.current_worker_task
        if app is self._app and task is not None and task.request.id == task_id:
            trace.get_current_span().set_attributes(_attributes({fact: reason}))


def _attributes(facts: dict[str, str]) -> dict[str, str]:
    return {f"{ATTRIBUTE}{name}": value for name, value in facts.items()}


def _add_trace(requests: Iterable[PublishRequest]) -> None:
    """Add the current trace context to the records of these calls."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if "traceparent" in carrier:
        for request in requests:
            request.label = request.label.partition(TRACED)[0] + TRACED + carrier["traceparent"]
