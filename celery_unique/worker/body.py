"""A task's body under its lock, in the process that runs it: release the key when it ends.

The lock is finished after the body and before Celery stores the result, or in the same act (see
``publish.stored_meta``), so that a caller who has
seen the result is never a duplicate of the finished task, and before callbacks and the next link
of a chain are sent, which may have the same key.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry
from celery.worker import state as worker_state

from celery_unique.followers.call import decoded
from celery_unique.followers.continuations import IN_BODY
from celery_unique.header import HEADER, LockHeader
from celery_unique.keys.merge import lists_in, with_lists
from celery_unique.policy.task_options import signature_of

from .delivery import Delivery, End

if TYPE_CHECKING:
    from celery_unique.config.app_state import AppState

Body = Callable[..., Any]


class HeldLock:
    """``self.request.unique``: the lock of the running task."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    @property
    def key(self) -> str:
        return self._delivery.header.key

    @property
    def token(self) -> int:
        """Grows with every start on this key: refuse writes that carry a smaller one."""
        return self._delivery.header.token

    def still_mine(self) -> bool:
        """Read from the store whether this delivery still holds the lock."""
        header = self._delivery.header
        record, _ = self._delivery.client.store.read(header.key)
        task = record.tasks.get(header.task_id)
        return task is not None and task.delivery == header.delivery and not task.released


def around_body(app_state: AppState, task: Any, original: Body) -> Body:
    """``original``, finishing the lock of its message when it ends."""

    @functools.wraps(original)
    def body(*args: Any, **kwargs: Any) -> Any:
        request = task.request_stack.top
        # A body that calls itself or another task directly takes no lock and releases none.
        if request is None or request.called_directly or IN_BODY in request.__dict__:
            return original(*args, **kwargs)
        request.__dict__[IN_BODY] = True
        try:
            delivery = None if request.is_eager else delivery_of(app_state, task, request)
            if delivery is None:
                return original(*args, **kwargs)
            request.unique = HeldLock(delivery)
            try:
                if delivery.header.payload:
                    decode = functools.partial(decoded, app_state.settings.follower_codec)
                    signature = signature_of(task)
                    lists = lists_in(delivery.header.payload, decode, signature)
                    args, kwargs = with_lists(signature, lists, args, kwargs)
                result = original(*args, **kwargs)
            except BaseException as error:
                finish(delivery, request, end_by(delivery, request, error))
                raise
            finish(delivery, request, End.SUCCESS)
            return result
        finally:
            request.__dict__[IN_BODY] = False

    return body


def delivery_of(app_state: AppState, task: Any, request: Any) -> Delivery | None:
    """The delivery whose body this process runs; None for a task without a lock."""
    delivery: Delivery | None = request.__dict__.get("unique_delivery")
    packed = getattr(request, HEADER, None)
    if delivery is not None or packed is None:
        return delivery
    # In a thread or greenlet of the worker. A process of the pool is forked with such requests.
    delivery = getattr(worker_state.requests.get(request.id), "unique_delivery", None)
    if (
        delivery is None
        or delivery.received_in != os.getpid()
        or not isinstance(packed, dict)
        or packed.get("delivery") != delivery.header.delivery
    ):
        header = LockHeader.from_message(packed)
        if header is None or not header.delivery or header.task_id != request.id:
            return None
        delivery = Delivery(app_state, header, task)
    request.unique_delivery = delivery
    return delivery


def finish(delivery: Delivery, request: Any, end: End | None) -> None:
    """The body's own release, unless that is left to the write of the result."""
    if end is not None and not delivery.defer(end, request):
        delivery.end_body(end)
        if delivery.followed:
            delivery.children = tuple(request.children)  # callbacks are not sent yet


def end_by(delivery: Delivery, request: Any, error: BaseException | None) -> End | None:
    """The end by an exception; None where the worker's main process decides."""
    if isinstance(error, Retry):
        return End.RETRY
    if isinstance(error, Reject):
        # A message that was acknowledged before the body is gone: it cannot be requeued.
        return End.REQUEUED if error.requeue and delivery.task.acks_late else End.REJECTED
    if isinstance(error, Ignore):
        return End.IGNORED
    if isinstance(error, Exception):
        return End.FAILURE
    # SystemExit and its like: in a pool child the worker's main process decides, since the
    # message may go back to the queue. Elsewhere no other process would.
    if delivery.runs_beside_the_gate() and not _is_time_limit(delivery.task, request, error):
        return End.FAILURE
    return None


def _is_time_limit(task: Any, request: Any, error: BaseException | None) -> bool:
    """Greenlets end at their time limit by an exception of their pool's, which then notifies the
    worker: that decides, since the message may go back to the queue."""
    limit = (request.timelimit or (None,))[0] or task.time_limit
    return bool(limit) and type(error).__module__.startswith(("gevent.", "eventlet."))


def end_without_body(
    delivery: Delivery, request: Any, celery_state: str | None, outcome: Any
) -> End | None:
    """Celery ended the task before its body: ``before_start`` raised, or Celery did."""
    if isinstance(outcome, (Retry, Reject, Ignore)):
        return end_by(delivery, request, outcome)
    if celery_state == states.SUCCESS:  # by a way that does not lead through our wrapper
        return End.SUCCESS
    error = sys.exc_info()[1]
    if celery_state == states.FAILURE or isinstance(error, Exception):
        return End.FAILURE
    return end_by(delivery, request, error)
