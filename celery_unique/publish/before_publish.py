"""Messages in which an id goes on that has its lock already: retries and replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import delay_ms
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.followers.continuations import continues, fail_link
from celery_unique.header import HEADER, LockHeader
from celery_unique.policy.fields import REPLACING
from celery_unique.policy.layers import take_call_options
from celery_unique.worker.monitor_events import shown_as_unique

from .coordinator import UniqueTaskCoordinator
from .joining import fails_under_its_id, may_follow
from .overlapped_acquire import patch_create_task_message
from .request import Outgoing, SendTask, collect, collected, current_request, prepare, registered


class SentEvent:
    """Stands in for Celery's dispatcher of ``task-sent`` events, for one unique message."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key

    def publish(self, type_: str, fields: dict[str, Any], producer: Any, **options: Any) -> None:
        fields = {**fields, "result": shown_as_unique(self._key)}
        self._app.amqp._event_dispatcher.publish(type_, fields, producer, **options)


def with_sent_event(
    app: Any, send_task: Callable[..., Any], are_sent: Callable[[], bool]
) -> Callable[..., Any]:
    """``app.send_task``, whose ``task-sent`` events (``task_send_sent_event``) tell of keys."""

    def send(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        packed = (options.get("headers") or {}).get(HEADER)
        if packed and are_sent():
            header = LockHeader.from_message(packed)
            if header is not None:
                options.setdefault("event_dispatcher", SentEvent(app, header.key))
        return send_task(name, args, kwargs, **options)

    return send


def is_sent_again(app_state: AppState, name: str, options: dict[str, Any]) -> bool:
    """Whether this is a retry (or another resend) of the task whose header it carries.

    A header that was copied from another task is taken off: it is not this call's.
    """
    request = _retried_request(app_state, name, options)
    packed = getattr(request, HEADER, None)
    headers = options.get("headers") or {}
    if packed is None:
        if HEADER not in headers:
            return False
        packed = headers[HEADER]
    header, wrong = LockHeader.read(packed)
    if wrong and (request is not None or options.get("retries")):
        # Carried as it came. A retry is never checked again: its own lock, which cannot be read
        # here, would make it a duplicate of itself.
        options["headers"] = {**headers, HEADER: packed}
        return True
    headers = {name: value for name, value in headers.items() if name != HEADER}
    again = header is not None and header.task_id == options.get("task_id")
    if again and header is not None:
        headers[HEADER] = header.as_published().as_message()
    options["headers"] = headers
    return again


def _retried_request(app_state: AppState, name: str, options: dict[str, Any]) -> Any:
    """The request of the running task, if this is its retry.

    A retry does not depend on the headers that it is published with: Celery takes them from a
    header named ``headers`` alone, where a tracing library has added one, and
    ``self.retry(headers=...)`` replaces them.
    """
    if "retries" not in options:
        return None
    request = current_request(app_state)
    if request is None or request.id != options.get("task_id") or request.task != name:
        return None
    return request


def is_handed_over(
    app_state: AppState, name: str, key: str | None, options: dict[str, Any]
) -> bool:
    """Whether this is ``self.replace(...)``: another task that goes on under our id.

    It inherits the lock, unless it is unique by a key of its own, or one of Celery's own
    tasks, at whose end nobody would give the lock back.
    """
    # First what is cheap to ask: all other calls pass here too.
    if not options.get("replaced_task_nesting") or name.startswith("celery."):
        return False
    request = current_request(app_state)
    if request is None or request.id != options.get("task_id"):
        return False
    header = LockHeader.from_message(getattr(request, HEADER, None))
    if header is None or (key is not None and key != header.key):
        return False
    headers = dict(options.get("headers") or {})
    headers[HEADER] = header.as_published().as_message()
    options["headers"] = headers
    return True


def send_on(
    app_state: AppState,
    original: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Publish the message in which an id goes on, and tell the body that is running under
    it, so that its end does not free the key.

    Told after the publish: one that failed must not leave a key that nobody holds.
    """
    result = original(name, args, kwargs, **options)
    request = current_request(app_state)
    if request is not None and request.id == options.get("task_id"):
        request.unique_goes_on_in_ms = delay_ms(app_state.app, options)
    return result


#: The parameters of ``Celery.send_task`` after the first three, for callers that
#: give them by position.
_PARAMETERS = (
    "countdown",
    "eta",
    "task_id",
    "producer",
    "connection",
    "router",
    "result_cls",
    "expires",
    "publisher",
    "link",
    "link_error",
    "add_to_parent",
    "group_id",
    "group_index",
    "retries",
    "chord",
    "reply_to",
    "time_limit",
    "soft_time_limit",
    "root_id",
    "parent_id",
    "route_name",
    "shadow",
    "chain",
    "task_type",
    "replaced_task_nesting",
)


def before_publish(app_state: AppState, original: SendTask) -> SendTask:
    """``app.send_task`` with uniqueness in front."""

    def send_task(
        name: str, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any
    ) -> Any:
        if positional:
            options.update(zip(_PARAMETERS, positional, strict=False))
        try:
            return _send(app_state, original, name, args, kwargs, options)
        except CeleryUniqueError as error:
            goes_on = continues(current_request(app_state))
            if not goes_on and not fails_under_its_id(error, options):
                raise
            return fail_link(app_state.app, name, options, error)

    return send_task


def _send(
    app_state: AppState,
    original: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    ours = take_call_options(options)
    if is_sent_again(app_state, name, options):
        return send_on(app_state, original, name, args, kwargs, options)
    task = options.get("task_type") or registered(app_state.app, name)
    attempt = prepare(app_state, name, task, args, kwargs, ours, options)
    if attempt is not None:
        # Before anything reaches the broker: this is where a wrong store URL is an error.
        _ = app_state.part(UniqueTaskCoordinator)
    if is_handed_over(app_state, name, attempt.key if attempt else None, options):
        return send_on(app_state, original, name, args, kwargs, options)
    outgoing = Outgoing(app_state, original, name, args, kwargs, options, attempt)
    outgoing = may_follow(app_state, outgoing)
    together = collected.get()
    if together is not None:
        return collect(together, outgoing)
    return _publish(outgoing)


def _publish(outgoing: Outgoing) -> Any:
    """Take its lock and send it, or find out who does its work."""
    attempt, app_state = outgoing.attempt, outgoing.app_state
    if attempt is None:
        return outgoing.original(outgoing.name, outgoing.args, outgoing.kwargs, **outgoing.options)
    # What a replacement is sent with depends on what it replaces, and Celery asks the
    # broker about messages that are to be delayed.
    alone = attempt.policy.on_conflict in REPLACING or attempt.delay_ms
    alone = alone or app_state.tells_what_is_sent
    alone = alone or not patch_create_task_message(app_state.app.amqp)
    send_when = None if alone else outgoing.send_when
    coordinator = app_state.part(UniqueTaskCoordinator)
    return outgoing.conclude(coordinator.publish(attempt, outgoing.send, send_when))
