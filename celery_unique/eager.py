"""Eager calls: carried out on the spot, with a lock only where ``unique_eager`` asks for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from celery import states

from .attempts import Attempt
from .header import LockHeader
from .identities import check_key, policy_for
from .options import take_call_options
from .outgoing import CANVAS
from .publish import policy_of, prepare
from .results import UniqueEagerResult, eager_result, with_facts
from .runtime import Runtime
from .stores.record import State

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

#: Ids that run under a lock in this process right now.
_running: set[str] = set()


def around_apply(runtime: Runtime, task: Any, original: Apply) -> Apply:
    """``task.apply``, which every eager call passes."""

    def apply(args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        options.update(zip(_PARAMETERS, positional, strict=False))
        ours = take_call_options(options)
        if options.get("task_id") in _running:  # a retry, under the lock of the first attempt
            return eager_result(original(args, kwargs, **options))
        if runtime.settings.eager:
            return _locked(runtime, task, original, args, kwargs, ours, options)
        # Wrong options are errors in eager test suites too, or they would hide them.
        policy_for(policy_of(runtime, task.name, task, ours)[0], task.name, ours)
        check_key(task.name, ours)
        return eager_result(original(args, kwargs, **options))

    return apply


def _locked(
    runtime: Runtime,
    task: Any,
    original: Apply,
    args: Any,
    kwargs: Any,
    ours: Mapping[str, Any],
    options: dict[str, Any],
) -> UniqueEagerResult:
    attempt = prepare(runtime, task.name, task, args, kwargs, ours, options)
    if attempt is None:
        return eager_result(original(args, kwargs, **options))
    attempt = replace(attempt, bypasses=_is_waited_for(runtime, attempt, options))
    run = partial(original, args, kwargs)
    published = runtime.coordinator.publish(attempt, partial(_run, runtime, task, run, options))
    result = published.result
    if result is None:  # the holder's: what it returned is not known here
        result = UniqueEagerResult(published.task_id, None, states.PENDING, None, task.name)
    return with_facts(eager_result(result), published.facts)  # type: ignore[no-any-return]


def _is_waited_for(runtime: Runtime, attempt: Attempt, options: Mapping[str, Any]) -> bool:
    """Whether a duplicate is carried out all the same: there is nobody whom it could follow."""
    if any(options.get(name) for name in CANVAS):
        return True
    # Whoever asks for an error knows that the callbacks will not fire.
    rejects = attempt.policy.on_conflict == "reject"
    if not rejects and (options.get("link") or options.get("link_error")):
        return True
    return attempt.parent_id is not None and options.get("task_id") is not None


def _run(
    runtime: Runtime,
    task: Any,
    run: Apply,
    options: Mapping[str, Any],
    task_id: str,
    header: LockHeader | None,
    _delay: int | None,
) -> Any:
    """In place of a publish: start, run and finish under the lock that was just taken."""
    options = {**options, "task_id": task_id}
    if header is None:
        return run(**options)
    delivery = f"{socket.gethostname()}/{os.getpid()}/eager/{task_id}"
    header = replace(header, delivery=delivery)
    runtime.holding.start(header, task.name, delivery, acks_late=False)
    end = State.DISCARDED
    _running.add(task_id)
    try:
        result = run(**options)
        end = _END_OF_STATE.get(result.state, State.DISCARDED)
        return result
    finally:
        _running.discard(task_id)
        runtime.holding.finish(header, task.name, end)
