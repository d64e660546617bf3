"""Ends a follower under its own id, with the outcome of the task that it follows.

In Celery's own order: callbacks and the next link of its chain are sent, then the result
is stored, then its chord is counted. A failure is stored first; then its chord is counted,
the rest of its chain fails, and error callbacks are sent. If a process dies in between,
another one does all of it that may not have been done: callbacks may be sent once more, and
nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery import group, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.canvas import maybe_signature
from celery.exceptions import BackendError, TaskRevokedError
from kombu.exceptions import OperationalError

from .call import FollowerCall
from .continuations import finishing

logger = logging.getLogger("celery_unique")


#: Result backends that cannot be read twice: results are messages, or nowhere.
_UNREADABLE = ("rpc://", "disabled://")

#: Why a task was dropped without being revoked.
_NOT_REVOKED = ("expired", "superseded", "withdrawn")

#: How many replacements in a row are read from the result backend.
_REPLACEMENTS = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended: SUCCESS with its value; FAILURE or REVOKED with the exception."""

    state: str
    value: Any
    traceback: str | None = None
    #: What its body has called, for the trail of its followers.
    children: tuple[Any, ...] = ()
    worker: str | None = None

    @classmethod
    def revoked(cls, reason: str = "revoked") -> Outcome:
        return cls(states.REVOKED, TaskRevokedError(reason))


def stored_outcome(app: Any, task_name: str, task_id: str) -> Outcome | None:
    """The outcome of a task in the result backend; None where there is none.

    A task that was dropped without being revoked has none: one that expired, say.
    """
    backend = _backend_of(app, task_name)
    for _ in range(_REPLACEMENTS):
        meta = _stored(backend, task_id)
        if meta is None:
            return None
        replacement = _replacement(meta)
        if not replacement:
            break
        task_id = replacement
    state, value = meta["status"], meta.get("result")
    if state == states.REVOKED and str(value).startswith(_NOT_REVOKED):
        return None
    return Outcome(state, value, meta.get("traceback"), worker=meta.get("worker"))


def _replacement(meta: Any) -> str:
    """The task that replaced one that never ran; empty for none."""
    return replacement_in(str(meta.get("result"))) if meta["status"] == states.REVOKED else ""


def ready_meta(app: Any, task_name: str, task_id: str) -> Any:
    """What the result backend has stored of a task that has ended; None where it has nothing."""
    meta = _stored(_backend_of(app, task_name), task_id)
    return None if meta is None or _replacement(meta) else meta


def has_ended(app: Any, call: FollowerCall) -> bool | None:
    """Whether a follower has its result; None where that cannot be read."""
    backend, task = _backend_of(app, call.name), app._tasks.get(call.name)
    if backend.as_uri() in _UNREADABLE or _is_ignored(task, call.request()):
        return None
    meta = _stored(backend, call.task_id)
    return meta is not None and not _replacement(meta)


def complete(app: Any, call: FollowerCall, outcome: Outcome) -> None:
    """End the follower with this outcome, or what is left to do of that if it has ended.

    Raises where broker or result backend cannot be reached: then it is not completed.
    """
    task = app._tasks.get(call.name)
    backend = _backend_of(app, call.name)
    request = call.request(hostname=outcome.worker)
    meta = _stored(backend, call.task_id)
    if meta is not None and _replacement(meta):
        meta = None  # superseded, it was taken for a call without a canvas
    request._children = list(outcome.children)
    stacks = () if task is None else (_task_stack, task.request_stack)
    depths = [len(stack) for stack in stacks]
    try:
        # What is published inside is the follower's: its trail, its root and its parent.
        for stack, top in zip(stacks, (task, request), strict=False):
            stack.push(top)
        with finishing():
            try:
                if meta is None:
                    _end(app, backend, task, request, outcome)
                else:
                    _complete_rest(backend, task, request, outcome, meta)
            except Exception as error:
                if may_work_later(app, call.name, error):
                    raise
                # It would not work the next time either: logged once, and it fails.
                logger.exception("%s[%s] could not be completed", call.name, call.task_id)
                if meta is None and outcome.state == states.SUCCESS:
                    _fail(
                        backend, task, request, Outcome(states.FAILURE, error), call_errbacks=False
                    )
    finally:
        # As deep as before, however far a signal has let it come; twice, since it may come here.
        try:
            _pop_to(depths, stacks)
        finally:
            _pop_to(depths, stacks)


def _pop_to(depths: Sequence[int], stacks: Sequence[Any]) -> None:
    for stack, depth in zip(stacks, depths, strict=True):
        while len(stack) > depth:
            stack.pop()


def _end(app: Any, backend: Any, task: Any, request: Context, outcome: Outcome) -> None:
    if outcome.state != states.SUCCESS:
        _fail(backend, task, request, outcome)
        return
    _send_on(app, request, outcome.value)
    backend.mark_as_done(request.id, outcome.value, request, not _is_ignored(task, request))


def _fail(
    backend: Any, task: Any, request: Context, outcome: Outcome, *, call_errbacks: bool = True
) -> None:
    stored = not _is_ignored(task, request) or getattr(task, "store_errors_even_if_ignored", False)
    # A revoked task leaves the rest of its chain waiting in Celery; a follower's rest ends
    # with it. Error callbacks are for failures alone, as in Celery.
    backend.mark_as_failure(
        request.id,
        outcome.value,
        outcome.traceback,
        request=request,
        store_result=stored,
        call_errbacks=call_errbacks and outcome.state == states.FAILURE,
        state=outcome.state,
    )


def _is_ignored(task: Any, request: Context) -> bool:
    """By the option of the call, or else of the task."""
    option = request.__dict__.get("ignore_result")
    return bool(getattr(task, "ignore_result", False) if option is None else option)


def _send_on(app: Any, request: Context, value: Any) -> None:
    """Callbacks and the next link, as Celery sends them: groups keep a trail of their own,
    so that they are sent one by one and the others together."""
    priority = request.delivery_info["priority"] if app.conf.task_inherit_parent_priority else None
    options = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": priority,
    }
    callbacks = [maybe_signature(callback, app=app) for callback in request.callbacks or ()]
    if len(callbacks) == 1:
        callbacks[0].apply_async((value,), **options)
    elif callbacks:
        for callback in callbacks:
            if isinstance(callback, group):
                callback.apply_async((value,), **options)
        others = [callback for callback in callbacks if not isinstance(callback, group)]
        if others:
            group(others, app=app).apply_async((value,), **options)
    if request.chain:
        link = maybe_signature(request.chain[-1], app=app)
        link.apply_async((value,), chain=request.chain[:-1], **options)


def _complete_rest(backend: Any, task: Any, request: Context, outcome: Outcome, meta: Any) -> None:
    """It has its result. The process that stored it may have died before the rest was done."""
    if not _counts_members(backend):
        request.chord = None
    if request.chord and _body_is_claimed(backend, request):
        raise BackendError("the body of its chord is being sent, or its sender has died")
    if meta["status"] == outcome.state != states.SUCCESS:
        _fail(backend, task, request, outcome)  # the same result once more, and the rest
    elif request.chord:
        backend.on_chord_part_return(request, meta["status"], meta.get("result"))


def _counts_members(backend: Any) -> bool:
    """Whether counting the same member of a chord twice is counting it once: Redis keeps the
    members, other backends a number, or look at the results themselves."""
    return hasattr(type(backend), "_chord_zset")


def _body_is_claimed(backend: Any, request: Context) -> bool:
    """Whether a process has claimed to send the body of its chord, and has not sent it yet.

    From 5.7 on Celery excludes others for some seconds. A process that counts the last member
    in that time sends nothing, and it would not be counted again if the claimant is dead.
    """
    claim = backend.client.get(backend.get_key_for_group(request.group, ".c"))
    return claim is not None and claim not in (b"done", "done")


def _backend_of(app: Any, task_name: str) -> Any:
    task = app._tasks.get(task_name)
    return task.backend if task is not None else app.backend


def _stored(backend: Any, task_id: str) -> Any:
    """The meta of a task that has ended, as the result backend has it now; or None."""
    if backend.as_uri() in _UNREADABLE:
        return None
    meta = backend.get_task_meta(task_id, cache=False)
    return meta if meta["status"] in states.READY_STATES else None


def may_work_later(app: Any, task_name: str, error: Exception) -> bool:
    """Whether broker or result backend cannot be reached, or refuse for now."""
    if isinstance(error, (OperationalError, BackendError, OSError)):
        return True
    if isinstance(error, KeyError):  # QueueNotFound; Celery has it among Redis's connection errors
        return False
    return bool(_backend_of(app, task_name).exception_safe_to_retry(error))


#: How a superseded task's reason begins, in the result backend.
_SUPERSEDED_BY = "superseded by task "


def replacement_in(reason: str) -> str:
    """The task that replaced one that ended for this reason; empty for none."""
    return reason.removeprefix(_SUPERSEDED_BY) if reason.startswith(_SUPERSEDED_BY) else ""


def reason_of(mark: str, by: str) -> str:
    """Why a message is dropped at the gate, for the result backend and the log."""
    return f"{mark} by task {by}" if by else mark
