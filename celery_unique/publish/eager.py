"""Eager calls: they run in the calling process, with a lock only under ``unique_eager``."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from celery import Task, group, states
from celery.canvas import _chain, _chord
from celery.result import EagerResult
from celery.utils import uuid

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.followers.continuations import continues, fail_link
from celery_unique.header import LockHeader
from celery_unique.keys.identity import check_key
from celery_unique.policy.layers import take_call_options
from celery_unique.policy.task_options import warn_of_left_over
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.record import State, is_kept
from celery_unique.worker.lock_client import WorkerLockClient

from .coordinator import UniqueTaskCoordinator
from .joining import JOINING, fails_under_its_id
from .request import CANVAS, PublishRequest, current_request, policy_of, prepare, rejecting
from .results import CallOutcome, UniqueEagerResult, eager_result, with_facts
from .store_client import REMEMBERED

#: The parameters of ``Task.apply`` after the first two, for callers that give them by position.
_PARAMETERS = (
    "link",
    "link_error",
    "task_id",
    "retries",
    "throw",
    "logfile",
    "loglevel",
    "headers",
)
_END_OF_STATE = {states.SUCCESS: State.COMPLETED, states.IGNORED: State.CANCELLED}

Apply = Callable[..., Any]

#: Ids that were called with a key and run in this process right now, and that key.
_running: dict[str, str] = {}

#: What ended in this process and still holds its key, by id: a duplicate has the same outcome.
_ended: BoundedDict[str, EagerResult] = BoundedDict(REMEMBERED)

#: Celery's eager canvases. They call ``apply`` of their members, as any caller.
_CANVASES = (_chain.apply.__code__, group.apply.__code__, _chord.apply.__code__)


def around_apply(app_state: AppState, task: Any, original: Apply) -> Apply:
    """``task.apply``, which every eager call passes."""

    def apply(args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        options.update(zip(_PARAMETERS, positional, strict=False))
        ours = take_call_options(options)
        if options.get("task_id") in _running:  # a retry: it continues as the first attempt began
            return eager_result(original(args, kwargs, **options))
        if app_state.settings.eager:
            return _call(app_state, task, original, args, kwargs, ours, options)
        # Wrong options are errors in eager test suites too, or they would hide them.
        policy_of(app_state, task.name, task, ours)
        parent = current_request(app_state)
        run_id = parent.id if parent is not None else None
        check_key(task.name, ours, app_state.settings.idempotency_scope, run_id)
        return eager_result(original(args, kwargs, **options))

    return apply


def _call(
    app_state: AppState,
    task: Any,
    original: Apply,
    args: Any,
    kwargs: Any,
    ours: Mapping[str, Any],
    options: dict[str, Any],
) -> UniqueEagerResult:
    run = partial(original, args, kwargs)
    try:
        policy, signature = policy_of(app_state, task.name, task, ours)
        if policy is None:
            return eager_result(run(**options))
        coordinator = app_state.part(UniqueTaskCoordinator)
        task_id = options.get("task_id") or uuid()
        request = PublishRequest(app_state, original, task.name, args, kwargs, options, task_id)
        warn_of_left_over(task.name, task, options)
        prepare(request, task, policy, signature, ours, coordinator)
        if request.policy.on_conflict in ("queue", "merge"):
            # It runs here, with its own values, and now or never.
            request.policy, request.merge = rejecting(request.policy), ""
        request.run = partial(_run, app_state, task, request.key, run, options)
        return _locked(coordinator, task, request)
    except CeleryUniqueError as error:
        # Of a callback it would be the error of the task which has just succeeded, and of a
        # member of a group that of all its members.
        if not (continues(current_request(app_state)) or fails_under_its_id(error, options)):
            raise
        options = {**options, "task_id": options.get("task_id") or uuid(), "ignore_result": True}
        fail_link(app_state.app, task.name, options, error)
        return UniqueEagerResult(options["task_id"], error, states.FAILURE, None, task.name)


def _locked(
    coordinator: UniqueTaskCoordinator, task: Any, request: PublishRequest
) -> UniqueEagerResult:
    options, parent_id = request.options, request.parent_id
    if parent_id and _running.get(parent_id) == request.key:
        # Its own successor, which cannot wait here: its predecessor waits for it.
        reporting.running_unlocked(
            task.name, request.task_id, reason="it is called by the task it comes after"
        )
        result = request.send(request.task_id, None, None)
        return _with_facts(result, CallOutcome("bypassed", False, request.key))
    in_canvas = request.policy.on_conflict in JOINING and _is_in_canvas(options)
    awaited = _is_awaited(request)

    def bypasses(holder_id: str) -> bool:
        """A duplicate that is awaited runs: there is no holder to follow."""
        return awaited or (in_canvas and holder_id not in _ended)

    request.bypasses = bypasses
    outcome = coordinator.publish(request)
    result = outcome.result
    if result is None:
        result = _outcome_of(outcome.task_id, task.name)
    return _with_facts(result, outcome.facts)


def _with_facts(result: Any, facts: CallOutcome) -> UniqueEagerResult:
    return with_facts(eager_result(result), facts)  # type: ignore[no-any-return]


def _outcome_of(holder_id: str, task_name: str) -> UniqueEagerResult:
    """The holder's, where it is known: not while it runs, nor where it ended elsewhere."""
    ended = _ended.get(holder_id)
    if ended is None:
        return UniqueEagerResult(holder_id, None, states.PENDING, None, task_name)
    return UniqueEagerResult(*ended.__reduce_args__())


def _is_awaited(request: PublishRequest) -> bool:
    """Whether the call's own callbacks, or its very id, are awaited."""
    # A caller that prefers an error knows that the callbacks will not fire.
    options, rejects = request.options, request.policy.on_conflict == "reject"
    if not rejects and (options.get("link") or options.get("link_error")):
        return True
    # The id of the task that calls, for its retry or its replacement.
    return request.parent is not None and options.get("task_id") == request.parent.id


def _is_in_canvas(options: Mapping[str, Any]) -> bool:
    """Whether a chain, group or chord makes this call: it continues with what the call returns.

    Celery passes that only to members of groups: for the others only the stack shows it.
    """
    if any(options.get(name) for name in CANVAS):
        return True
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code in _CANVASES:
            return True
        if frame.f_code is Task.apply.__code__:  # of the task in whose body the call is made
            return False
    return False


def _run(
    app_state: AppState,
    task: Any,
    key: str,
    run: Apply,
    options: Mapping[str, Any],
    task_id: str,
    header: LockHeader | None,
) -> Any:
    """Instead of a publish: start, run and finish under the lock that was just acquired."""
    run = partial(run, **{**options, "task_id": task_id})
    _running[task_id] = key
    try:
        return run() if header is None else _run_held(app_state, task, run, header)
    finally:
        _running.pop(task_id, None)


def _run_held(app_state: AppState, task: Any, run: Apply, header: LockHeader) -> Any:
    task_id = header.task_id
    delivery = f"{socket.gethostname()}/{os.getpid()}/eager/{task_id}"
    header = replace(header, delivery=delivery)
    app_state.part(WorkerLockClient).start(header, task.name, acks_late=False)
    end = State.DISCARDED
    result = None
    try:
        result = run()
        end = _END_OF_STATE.get(result.state, State.DISCARDED)
        return result
    except Exception as error:
        result = EagerResult(task_id, error, states.FAILURE, None, task.name)
        raise
    finally:
        if is_kept(end, header.keep) and result is not None:
            _ended.remember(task_id, result)
        app_state.part(WorkerLockClient).finish(header, task.name, end)
