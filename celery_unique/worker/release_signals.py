"""Celery's signals for the end of a task, in the process that runs it or receives its message.

``task_postrun`` settles the lock once the result is stored, and completes the followers.
``task_success``, ``task_failure`` and ``task_revoked`` are the backstop of the release: a body or
a request that has released its lock leaves them nothing to do, and they cost no act of the store.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.exceptions import WorkerLostError
from celery.utils.serialization import get_pickleable_exception

from celery_unique.followers.complete import Outcome
from celery_unique.followers.promote import end_with_followers
from celery_unique.header import HEADER

from .body import delivery_of, end_by, end_without_body
from .delivery import Delivery, DeliveryState, End

if TYPE_CHECKING:
    from celery_unique.config.app_state import AppState


class ReleaseSignals:
    """The receivers of one app. Kept alive by its fixup, since Celery holds receivers weakly."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    def connect(self) -> None:
        for signal, receiver in (
            (signals.task_postrun, self.on_postrun),
            (signals.task_success, self.on_success),
            (signals.task_failure, self.on_failure),
            (signals.task_revoked, self.on_revoked),
        ):
            # Named: up to 5.6, Celery takes the methods of two apps for one receiver.
            signal.connect(receiver, dispatch_uid=object())

    def on_success(self, sender: Any = None, **_: Any) -> None:
        delivery, _request = self._running(sender)
        if delivery is not None and delivery.state is DeliveryState.STARTED:
            delivery.end_body(End.SUCCESS, backstop=True)

    def on_failure(self, sender: Any = None, task_id: str = "", **_: Any) -> None:
        # A hard time limit is reported by this signal even where Celery requeues the message,
        # and without the task's request: the worker's request decides about that.
        delivery, request = self._running(sender)
        if delivery is None or request.id != task_id:
            return
        if delivery.state is DeliveryState.STARTED:
            delivery.end_body(End.FAILURE, backstop=True)

    def on_revoked(
        self, sender: Any = None, request: Any = None, expired: bool = False, **_: Any
    ) -> None:
        """In the worker's main process, when the message of a revoked task is reached."""
        delivery: Delivery | None = getattr(request, "unique_delivery", None)
        if delivery is None or delivery.app_state is not self._app_state:
            return
        if delivery.state in (DeliveryState.RECEIVED, DeliveryState.WAITING, DeliveryState.STARTED):
            delivery.ends_as(End.REVOKED)
            delivery.release()
            delivery.settle_with(None if expired else Outcome.revoked())

    def on_postrun(
        self, sender: Any = None, state: str | None = None, retval: Any = None, **_: Any
    ) -> None:
        """The result is stored: settle what was recorded until now."""
        delivery, request = self._running(sender)
        if delivery is None:
            return
        has_ended = delivery.state is DeliveryState.FINISHED and not delivery.unsettled
        if has_ended and not delivery.followed and request.id not in self._app_state.joined:
            return
        if delivery.deferred is not None:  # the result was not stored
            error = sys.exc_info()[1]
            end = delivery.deferred if error is None else end_by(delivery, request, error)
            if end is not None:
                delivery.end_body(end, backstop=True)
        elif delivery.state is DeliveryState.STARTED:  # the body was not reached, or not its end
            end = end_without_body(delivery, request, state, retval)
            if end is not None:
                delivery.end_body(end)
        settle = partial(_settle, delivery, state)
        followed, delivery.followed = delivery.followed, False
        # Its own continuations join it after its end, if their policy still counts it.
        if not followed and request.id not in self._app_state.joined:
            settle()
            return
        self._app_state.joined.pop(request.id, None)
        outcome = _outcome(request, state, retval, delivery.children)
        end_with_followers(self._app_state, delivery.header, delivery.task.name, outcome, settle)

    def _running(self, sender: Any) -> tuple[Delivery | None, Any]:
        request = sender.request_stack.top if sender is not None else None
        if request is None or sender.app is not self._app_state.app:
            return None, request
        delivery: Delivery | None = request.__dict__.get("unique_delivery")
        if delivery is None and getattr(request, HEADER, None) is not None:
            delivery = None if request.is_eager else delivery_of(self._app_state, sender, request)
        return delivery, request


def _settle(delivery: Delivery, celery_state: str | None) -> None:
    if not delivery.unsettled:
        return
    delivery.unsettled = False
    if celery_state == states.FAILURE:
        delivery.ends_as(End.FAILURE)
    if delivery.is_unacknowledged():
        delivery.settle_once_acknowledged()
    else:
        delivery.settle(again=delivery.header.again)


def _outcome(
    request: Any, celery_state: str | None, outcome: Any, children: tuple[Any, ...]
) -> Outcome | None:
    """What its followers get; None where they get nothing, and one of them is run instead."""
    if celery_state == states.SUCCESS:
        return Outcome(states.SUCCESS, outcome, children=children, worker=request.hostname)
    if celery_state == states.IGNORED:
        return None
    if celery_state is None:  # SystemExit or its like, after which the task cannot continue
        outcome = WorkerLostError(f"The task ended by {sys.exc_info()[1]!r}")
    error = get_pickleable_exception(outcome)
    einfo = ExceptionInfo((type(error), error, outcome.__traceback__))
    return Outcome(states.FAILURE, error, einfo.traceback, children, request.hostname)
