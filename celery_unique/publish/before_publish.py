"""The hook in ``app.send_task``, which every way of enqueueing passes.

A message that continues a task which holds its lock already (a retry, ``self.replace``) is
published as it is. Any other unique call becomes a ``PublishRequest`` for the coordinator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery.utils import uuid

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import delay_ms
from celery_unique.exceptions import CeleryUniqueError, IdempotencyKeyRequired, UniqueKeyError
from celery_unique.followers.continuations import continues, fail_link
from celery_unique.header import HEADER, LockHeader
from celery_unique.policy.layers import OPTIONS_OF_CELERY, take_call_options
from celery_unique.policy.task_options import warn_of_left_over
from celery_unique.worker.body import delivery_of

from .coordinator import UniqueTaskCoordinator
from .joining import fails_under_its_id, prepare_to_join, share_outcome
from .request import (
    PublishOutcome,
    PublishRequest,
    SendTask,
    SentEvent,
    collected,
    current_request,
    policy_of,
    prepare,
    registered,
)
from .results import CallFacts
from .stored_meta import mark_superseded

#: The parameters of ``Celery.send_task`` after the first three, for callers that pass them by
#: position.
_PARAMETERS = (
    *("countdown", "eta", "task_id", "producer", "connection", "router", "result_cls"),
    *("expires", "publisher", "link", "link_error", "add_to_parent", "group_id", "group_index"),
    *("retries", "chord", "reply_to", "time_limit", "soft_time_limit", "root_id", "parent_id"),
    *("route_name", "shadow", "chain", "task_type", "replaced_task_nesting"),
)

#: The errors of a call that has no key.
HAS_NO_KEY = (UniqueKeyError, IdempotencyKeyRequired)


def before_publish(app_state: AppState, send_task: SendTask) -> SendTask:
    """``app.send_task`` with uniqueness in front."""

    def send(
        name: str, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any
    ) -> Any:
        if positional:
            options.update(zip(_PARAMETERS, positional, strict=False))
        try:
            return _publish(app_state, send_task, name, args, kwargs, options)
        except CeleryUniqueError as error:
            if app_state.settings.dry_run and isinstance(error, HAS_NO_KEY):
                options["task_id"] = options.get("task_id") or uuid()
                reporting.would_raise(name, options["task_id"], reason=str(error))
                return send_task(name, args, kwargs, **options)
            if not (continues(current_request(app_state)) or fails_under_its_id(error, options)):
                raise
            return fail_link(app_state.app, name, options, error)

    return send


def _publish(
    app_state: AppState,
    send_task: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    known = options.keys() <= OPTIONS_OF_CELERY
    unique_options = {} if known else take_call_options(options)
    if _pop_own_header(app_state, name, options):
        return _continue(app_state, send_task, name, args, kwargs, options)
    task = options.get("task_type") or registered(app_state.app, name)
    policy, signature = policy_of(app_state, name, task, unique_options)
    batch, replaces_itself = collected.get(), options.get("replaced_task_nesting")
    if policy is None and batch is None and not replaces_itself:
        return send_task(name, args, kwargs, **options)
    task_id = options.get("task_id") or ""
    request = PublishRequest(app_state, send_task, name, args, kwargs, options, task_id)
    if policy is not None:
        # Before the broker is used: a wrong store URL is an error here.
        coordinator: UniqueTaskCoordinator = app_state.parts.get(
            UniqueTaskCoordinator
        ) or app_state.part(UniqueTaskCoordinator)
        if not known:
            warn_of_left_over(name, task, options)
        prepare(request, task, policy, signature, unique_options, coordinator)
    if replaces_itself and _hand_over_lock(app_state, name, request.key, options):
        return _continue(app_state, send_task, name, args, kwargs, options)
    if policy is not None:
        if request.awaited or app_state.results_by_message or request.policy.on_conflict == "queue":
            prepare_to_join(request, coordinator.settings)
        if batch is None:
            return conclude(request, coordinator.publish(request))
    elif batch is None:
        return send_task(name, args, kwargs, **options)
    result = (options.get("result_cls") or app_state.app.AsyncResult)(request.identify())
    batch.append((request, result))
    return result


def conclude(request: PublishRequest, outcome: PublishOutcome) -> Any:
    """The result for the caller."""
    app, options = request.app_state.app, request.options
    for task_id in outcome.superseded:
        mark_superseded(app, task_id, outcome.task_id, options, request.key)
    result = outcome.result
    if result is None:
        if request.follower is not None:
            outcome = share_outcome(request, outcome)
        result = (options.get("result_cls") or app.AsyncResult)(outcome.task_id)
        result.ignored = options.get("ignore_result")
        if request.parent is not None and options.get("add_to_parent", True):
            app.current_worker_task.add_trail(result)
    if isinstance(result, CallFacts):
        result.call_facts = outcome.facts
    return result


# -- messages that continue a task ------------------------------------------------------


def _pop_own_header(app_state: AppState, name: str, options: dict[str, Any]) -> bool:
    """Whether this is a retry (or another resend) of the task whose header it carries; the
    header is then made ready for the message. One copied from another task is removed.
    """
    headers = options.get("headers") or {}
    request = None
    if "retries" in options:
        # A retry does not depend on the headers that it is published with: Celery takes them from
        # a header named ``headers`` alone, where a tracing library has added one, and
        # ``self.retry(headers=...)`` replaces them.
        request = current_request(app_state)
        if request is not None and (request.id != options.get("task_id") or request.task != name):
            request = None
    packed = getattr(request, HEADER, None)
    if packed is None:
        if HEADER not in headers:
            return False
        packed = headers[HEADER]
    header, wrong = LockHeader.read(packed)
    if wrong and (request is not None or options.get("retries")):
        # Carried unchanged. A retry is never checked again: its own lock, which cannot be read
        # here, would make it a duplicate of itself.
        options["headers"] = {**headers, HEADER: packed}
        return True
    options["headers"] = {each: value for each, value in headers.items() if each != HEADER}
    if header is None or header.task_id != options.get("task_id"):
        return False
    options["headers"][HEADER] = header.as_published().as_message()
    return True


def _hand_over_lock(app_state: AppState, name: str, key: str, options: dict[str, Any]) -> bool:
    """Whether this is ``self.replace(...)``: another task that continues under the same id. The
    lock's header is then added to its message.

    The task inherits the lock, unless it is unique by a key of its own, or one of Celery's own
    tasks, whose end would not release the lock.
    """
    request = current_request(app_state)
    if name.startswith("celery.") or request is None or request.id != options.get("task_id"):
        return False
    header = LockHeader.from_message(getattr(request, HEADER, None))
    if header is None or (key and key != header.key):
        return False
    headers = dict(options.get("headers") or {})
    # It continues with what its message says, not with what was merged before it was replaced.
    headers[HEADER] = replace(header.as_published(), merge=False).as_message()
    options["headers"] = headers
    return True


def _continue(
    app_state: AppState,
    send_task: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Publish the message in which an id continues, and mark the body that runs under that id,
    so that its end does not release the key.

    Marked after the publish: one that failed must not leave a key without a holder.
    """
    sent_options = options
    if app_state.sends_sent_events:
        header = LockHeader.from_message(options["headers"].get(HEADER))
        if header is not None:
            event = SentEvent(app_state.app, header.key)
            sent_options = {"event_dispatcher": event, **options}
    result = send_task(name, args, kwargs, **sent_options)
    request = current_request(app_state)
    if request is not None and request.id == options.get("task_id"):
        delivery = delivery_of(app_state, app_state.app.current_worker_task, request)
        if delivery is not None:
            delivery.continues_in_ms = delay_ms(app_state.app, options)
    return result
