"""Around a task's body, in the process that runs it: give the key back when it ends.

The lock is finished after the body and before Celery stores the result, so that
a caller who has seen the result is never told duplicate by the finished task, and
before callbacks and the next link of a chain are sent, which may have the same key.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError
from celery.utils.serialization import get_pickleable_exception
from celery.worker import state as worker_state

from celery_unique.followers.complete import Outcome
from celery_unique.followers.continuations import BODY_OVER
from celery_unique.followers.promote import end_with_followers
from celery_unique.header import HEADER, DeliveryName, LockHeader
from celery_unique.publish.stored_meta import DUPLICATES
from celery_unique.stores.record import State

from .lock_client import WorkerLockClient

if TYPE_CHECKING:
    from celery_unique.config.app_state import AppState

Body = Callable[..., Any]


class HeldLock:
    """``self.request.unique``: the lock of the running task."""

    __slots__ = ("_app_state", "_header")

    def __init__(self, app_state: AppState, header: LockHeader) -> None:
        self._app_state = app_state
        self._header = header

    @property
    def key(self) -> str:
        return self._header.key

    @property
    def token(self) -> int:
        """Grows with every start on this key: refuse writes that carry a smaller one."""
        return self._header.token

    def still_mine(self) -> bool:
        """Ask the store whether this delivery still holds the lock."""
        record, _ = self._app_state.part(WorkerLockClient).store.read(self._header.key)
        task = record.tasks.get(self._header.task_id)
        return task is not None and task.delivery == self._header.delivery and not task.released


def around_body(app_state: AppState, task: Any, original: Body) -> Body:
    """``original``, finishing the lock of its message when it ends."""

    @functools.wraps(original)
    def body(*args: Any, **kwargs: Any) -> Any:
        request = task.request_stack.top
        if request is None or _is_inner_call(request):
            return original(*args, **kwargs)
        request.unique_in_body = True
        found = None if request.is_eager else getattr(request, HEADER, None)
        header = LockHeader.from_message(found)
        try:
            if header is None or header.task_id != request.id or not header.delivery:
                return original(*args, **kwargs)
            return _run(app_state, task, request, header, original, args, kwargs)
        finally:
            request.__dict__[BODY_OVER] = True

    return body


def _is_inner_call(request: Any) -> bool:
    """A body that calls itself or another task directly takes no lock and frees none."""
    return request.called_directly or "unique_in_body" in request.__dict__


def _run(
    app_state: AppState,
    task: Any,
    request: Any,
    header: LockHeader,
    original: Body,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    request.unique = HeldLock(app_state, header)
    ending = _Ending(app_state, task, request, header)
    try:
        result = original(*args, **kwargs)
    except (Retry, Reject, Ignore) as control:
        ending.controlled(control)
        raise
    except Exception:
        ending.finish(State.DISCARDED)
        raise
    except BaseException as exit_:
        ending.interrupted(exit_)
        raise
    ending.finish(State.COMPLETED)
    return result


class _Ending:
    """How one body ended, told to the store."""

    def __init__(self, app_state: AppState, task: Any, request: Any, header: LockHeader) -> None:
        self._holding = app_state.part(WorkerLockClient)
        self._task = task
        self._request = request
        self._header = header

    def controlled(self, control: Exception) -> None:
        """Retry, Reject, Ignore: exceptions that are orders to Celery."""
        # A message that was acknowledged before the body is gone: it cannot be requeued.
        requeued = isinstance(control, Reject) and control.requeue and self._task.acks_late
        if isinstance(control, Retry) or requeued:
            self._keep()
        elif isinstance(control, Reject):
            self.finish(State.DISCARDED, rejected=bool(self._task.acks_late))
        else:
            self.finish(State.CANCELLED)

    def finish(self, state: State, *, rejected: bool = False) -> None:
        # The id goes on in a message that was sent from the body: a retry without
        # raising, or a replacement.
        if self._goes_on_in_ms() is not None:
            self._keep()
            return
        self._holding.ended_here(self._header.delivery)
        # What stays recorded after the end is settled when the result is stored: that may
        # fail, and turn a success into a failure.
        finished = self._holding.finish(
            self._header,
            self._task.name,
            state,
            settle_later=bool(
                self._task.acks_late or self._header.keep or self._is_unacknowledged()
            ),
            # Only known here to a store that is away now; else the worker says so, with settle.
            rejected=rejected,
        )
        self._request.__dict__[DUPLICATES] = finished.duplicates
        if finished.settle and not self._task.acks_late:
            self._request.unique_settle = (self._header, state)
        if finished.followers:
            # What the body has called; callbacks and the next link are not sent yet.
            self._request.unique_followed = tuple(self._request.children)

    def without_body(self, celery_state: str | None, outcome: Any) -> None:
        """Celery ended the task before its body: ``before_start`` raised, or Celery did."""
        if isinstance(outcome, (Retry, Reject, Ignore)):
            self.controlled(outcome)
        elif celery_state == states.SUCCESS:  # by a way that does not lead through our wrapper
            self.finish(State.COMPLETED)
        elif celery_state == states.FAILURE or isinstance(sys.exc_info()[1], Exception):
            self.finish(State.DISCARDED)
        else:
            self.interrupted(sys.exc_info()[1])

    def interrupted(self, exit_: BaseException | None) -> None:
        """SystemExit and its like: in a pool child the worker's main process decides,
        since the message may go back to the queue. Elsewhere nobody else would."""
        if _runs_beside_the_gate(self._header) and not self._is_time_limit(exit_):
            self.finish(State.DISCARDED)

    def _is_time_limit(self, exit_: BaseException | None) -> bool:
        """Greenlets end at their time limit by an exception of their pool's, which then
        tells the worker: that decides, since the message may go back to the queue."""
        limit = (self._request.timelimit or (None,))[0] or self._task.time_limit
        return bool(limit) and type(exit_).__module__.startswith(("gevent.", "eventlet."))

    def _is_unacknowledged(self) -> bool:
        """Whether an early acknowledgement is still to be sent: on solo, where the body keeps
        the event loop from that."""
        request = _request_of(self._header)
        return request is not None and request.is_unacknowledged()

    def _goes_on_in_ms(self) -> int | None:
        delay: int | None = self._request.__dict__.get("unique_goes_on_in_ms")
        return delay

    def _keep(self) -> None:
        self._holding.ended_here(self._header.delivery)
        # A message that is not acknowledged yet can come back after the retry has ended.
        copies = bool(self._task.acks_late) or self._header.again
        if not copies and self._is_unacknowledged():
            copies = _request_of(self._header).may_exist_twice()
        self._holding.retried(self._header, self._task.name, self._goes_on_in_ms() or 0, copies)


def _request_of(header: LockHeader) -> Any:
    """The request of a body that runs in the worker's main process; None in one of the pool's."""
    request = worker_state.requests.get(header.task_id)
    lock = getattr(request, "unique_lock", None)
    return request if lock is not None and lock.delivery == header.delivery else None


def _runs_beside_the_gate(header: LockHeader) -> bool:
    return DeliveryName.parse(header.delivery).process == str(os.getpid())


def after_result(
    app_state: AppState, task: Any, request: Any, celery_state: str | None, outcome: Any
) -> None:
    """The result is stored: let go of what was kept until now."""
    if request.unique is None:  # the body was not reached
        header = LockHeader.from_message(getattr(request, HEADER, None))
        if header is None or not header.delivery or header.task_id != request.id:
            return
        _Ending(app_state, task, request, header).without_body(celery_state, outcome)
    waiting = request.__dict__.pop("unique_settle", None)
    followed = request.__dict__.pop("unique_followed", None)
    settle = partial(_settle, app_state, task, waiting, celery_state)
    # Its own continuations join it after its end, if their policy still counts it.
    if followed is None and not app_state.was_joined_here(request.id):
        settle()
        return
    header = LockHeader.from_message(getattr(request, HEADER, None))
    if header is not None:
        outcome = _outcome(request, celery_state, outcome, followed or ())
        end_with_followers(app_state, header, task.name, outcome, settle)


def _settle(
    app_state: AppState,
    task: Any,
    waiting: tuple[LockHeader, State] | None,
    celery_state: str | None,
) -> None:
    if waiting is not None:
        header, state = waiting
        state = State.DISCARDED if celery_state == states.FAILURE else state
        request = _request_of(header)
        if request is not None and request.is_unacknowledged():
            request.settle_early(state)
        else:
            app_state.part(WorkerLockClient).settle(header, task.name, state)


def _outcome(
    request: Any, celery_state: str | None, outcome: Any, children: tuple[Any, ...]
) -> Outcome | None:
    """What its followers get; None where they get nothing, and one of them is run instead."""
    if celery_state == states.SUCCESS:
        return Outcome(states.SUCCESS, outcome, children=children, worker=request.hostname)
    if celery_state == states.IGNORED:
        return None
    if celery_state is None:  # SystemExit or its like, with which nobody could go on
        outcome = WorkerLostError(f"The task ended by {sys.exc_info()[1]!r}")
    error = get_pickleable_exception(outcome)
    einfo = ExceptionInfo((type(error), error, outcome.__traceback__))
    return Outcome(states.FAILURE, error, einfo.traceback, children, request.hostname)


def connect_body_end(app_state: AppState) -> Any:
    """The receiver for ``task_postrun``, in every process that runs bodies."""

    def on_postrun(
        sender: Any = None, state: str | None = None, retval: Any = None, **_: Any
    ) -> None:
        request = sender.request_stack.top if sender is not None else None
        if request is None or getattr(request, HEADER, None) is None or request.is_eager:
            return
        if sender.app is app_state.app:
            after_result(app_state, sender, request, state, retval)

    signals.task_postrun.connect(on_postrun)
    return on_postrun
