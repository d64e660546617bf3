"""Maps the callbacks of Celery's ``Request`` to the delivery of its message.

Here are the ends that only the worker's main process sees: a killed child, a hard time limit, a
revoke, a shutdown; and the acknowledgement after which the record of a task may go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Task, states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from kombu.transport.virtual import QoS as VirtualQoS

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.complete import Outcome
from celery_unique.followers.continuations import finishing
from celery_unique.followers.promote import reap_orphans
from celery_unique.header import HEADER, DeliveryName, LockHeader, is_id
from celery_unique.keys.digest import guard_key
from celery_unique.stores.record import State

from . import gate
from .ack import RECORDS
from .delivery import Delivery, DeliveryState, End
from .monitor_events import shown_as_unique

logger = logging.getLogger("celery_unique")

_KILLED = (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


class UniqueRequestMixin:
    """In front of Celery's ``Request``, for tasks of an installed app."""

    # Celery's request: here for the type checker.
    id: str
    task: Any
    name: str
    hostname: str
    acknowledged: bool
    _app: Any
    _request_dict: dict[str, Any]
    _message: Any

    #: Of the app whose tasks have this class.
    unique_app_state: AppState
    #: Messages without a key are guarded: ``unique_guard``.
    unique_guarded = False
    #: All that this library adds to a request. None: the message has no lock.
    unique_delivery: Delivery | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        records = getattr(self._message.channel, RECORDS, None)
        if records is not None:
            records.confirm()
        header, wrong = LockHeader.read(self._request_dict.get(HEADER))
        if wrong:
            # Left in the message, for a retry that a newer worker may understand.
            reporting.unreadable_header(self._app, self.name, str(self.id), wrong)
        elif header is not None and header.task_id == self.id:
            header.receive_as(str(DeliveryName.new(self.hostname)))
            self.unique_delivery = Delivery.received(self.unique_app_state, header, self)
        elif self.unique_guarded and is_id(self.id):
            self.unique_delivery = Delivery.received(self.unique_app_state, self._guard(), self)

    def _guard(self) -> LockHeader:
        """The lock of a message whose caller took none. The gate creates its record."""
        nesting = self._request_dict.get("replaced_task_nesting")
        key = guard_key(self.id, nesting if isinstance(nesting, int) else 0)
        name = str(DeliveryName.new(self.hostname))
        return LockHeader(self.id, key, guard=True, delivery=name)

    @cached_property
    def _context(self) -> Any:
        context = super()._context  # type: ignore[misc]
        context.unique_delivery = self.unique_delivery
        return context

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  Celery's name for it
        delivery = self.unique_delivery
        if delivery is not None:
            header = delivery.header
            if type == "task-started" and header.watched and not header.guard:  # no result yet
                fields["result"] = shown_as_unique(header.key)
            elif type == "task-revoked" and delivery.dropped_as:
                fields["result"] = delivery.dropped_as
        super().send_event(type, **fields)  # type: ignore[misc]

    # -- start -----------------------------------------------------------------------------

    def revoked(self) -> bool:
        """Celery's last question before it hands the task to the pool."""
        if super().revoked():  # type: ignore[misc]
            return True
        delivery = self.unique_delivery
        # Celery also asks on arrival, perhaps long before the ETA: not a start yet.
        if delivery is None or delivery.consumer is None or delivery.started:
            return False
        # In the queue it would be held up by a start that led to nothing.
        return delivery.worker_is_stopping() or not gate.let_through(self, delivery)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        if self.unique_delivery is not None:
            self.unique_delivery.accepted(pid)
        super().on_accepted(pid, time_accepted)  # type: ignore[misc]

    # -- acknowledgement -------------------------------------------------------------------

    def acknowledge(self) -> None:
        delivery = self.unique_delivery
        if delivery is None:
            super().acknowledge()  # type: ignore[misc]
            return
        if not self.acknowledged and delivery.is_taken_over(self._message):
            self._leave_message()
        else:
            if not self.acknowledged:
                delivery.notice_acknowledgement(self._message)
            if delivery.may_exist_twice():
                # A second delivery comes in any case, and must find the end of this one. After a
                # lost connection Celery may not return from the acknowledgement: it sets the
                # prefetch count in the thread of the pool, beside the event loop.
                delivery.acknowledged()
            try:
                super().acknowledge()  # type: ignore[misc]
            except Exception:
                # The connection broke meanwhile: whether it was sent is not known, and the end of
                # the task must be recorded in any case.
                delivery.redelivered = True
                delivery.acknowledged()
                raise
        delivery.acknowledged()
        # It waited for a thread of the pool for so long that it was delivered again:
        # the body, which is still to come, must leave a done mark.
        early = delivery.started and not self.task.acks_late
        if early and not delivery.header.again and delivery.may_exist_twice():
            delivery.header.again = True
            self._request_dict[HEADER] = delivery.header.as_message()

    def _leave_message(self) -> None:
        reporting.taken_over(self.name, self.id)
        # Forgotten in this process, kept in Redis.
        forget: Any = VirtualQoS.ack
        forget(self._message.channel.qos, self._message.delivery_tag)
        self.acknowledged = True

    def reject(self, requeue: bool = False) -> None:
        delivery = self.unique_delivery
        if delivery is not None:
            delivery.requeued = delivery.requeued or requeue
            if not self.acknowledged:
                if not requeue:
                    delivery.reject()
                delivery.notice_acknowledgement(self._message)
        super().reject(requeue=requeue)  # type: ignore[misc]
        if requeue or delivery is None:
            return
        # Celery cannot make sense of its ETA. (Up to 5.6 it runs the task immediately.)
        if not delivery.started and hasattr(worker_state, "task_scheduled"):
            delivery.ends_as(End.UNUSABLE)
            delivery.release()
            delivery.settle_with(None)
        delivery.acknowledged()

    def settle_unread(self) -> None:
        """Its worker has shut down, and has not read how the body ended: Celery's prefork pool may
        end before the last results are read. The message comes back, and must find the end."""
        delivery, task = self.unique_delivery, self.task
        if delivery is None or self.acknowledged or not (delivery.started and task.acks_late):
            return
        if gate.is_in_canvas(self):  # nor is it known whether that continues: it runs again
            return
        try:
            state = delivery.client.unsettled_state(delivery.header)
            if state is not None and self._result_is_stored():
                delivery.header.again = True
                delivery.client.settle(delivery.header, self.name, state)
        except StoreUnavailable as error:
            app, key = self._app, delivery.header.key
            reporting.store_error(app, "settle", error, self.name, self.id, key)

    def _result_is_stored(self) -> bool:
        backend = self.task.backend
        if self._request_dict.get("ignore_result") or self.task.ignore_result:
            return True
        if isinstance(backend, DisabledBackend):
            return True
        try:
            return backend.get_state(self.id) in states.READY_STATES
        except Exception:
            logger.exception("cannot read the result of task %s, which may run again", self.id)
            return False

    # -- end -------------------------------------------------------------------------------

    def on_retry(self, exc_info: Any) -> Any:
        if self.unique_delivery is not None:
            self.unique_delivery.continues()
        return super().on_retry(exc_info)  # type: ignore[misc]

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        error = _plain(exc_info.exception)
        if self.unique_delivery is not None:
            ignored = isinstance(error, Ignore)
            self.unique_delivery.ends_as(End.IGNORED if ignored else End.FAILURE)
        if not isinstance(error, _KILLED):
            with finishing():
                return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]
        with self._killed(error):
            return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        if soft:
            return super().on_timeout(soft, timeout)  # type: ignore[misc]
        with self._killed(TimeLimitExceeded(timeout)):
            return super().on_timeout(soft, timeout)  # type: ignore[misc]

    @contextmanager
    def _killed(self, error: BaseException) -> Iterator[None]:
        """Around what Celery does about a task whose process was killed."""
        delivery = self.unique_delivery
        if delivery is None:
            with finishing():
                yield
            return
        delivery.ends_as(End.KILLED)
        # A shutdown may have requeued it before.
        may_continue = delivery.requeued or self._may_be_sent_again(error)
        if not may_continue:
            delivery.release()  # gone for good: before the result is seen
        try:
            with finishing():
                yield
        finally:
            if may_continue:
                delivery.keep_or_release()
            # A success that was stored before is shared as it is stored.
            failed = delivery.outcome is State.DISCARDED
            delivery.settle_with(Outcome(states.FAILURE, error) if failed else None)

    def _may_be_sent_again(self, error: BaseException) -> bool:
        """Whether Celery may send a task whose process was killed to a worker again."""
        task = self.task
        if isinstance(error, TimeLimitExceeded):
            return bool(task.acks_late and not _acks_on_timeout(task))
        requeued = task.acks_late and task.reject_on_worker_lost
        return bool(requeued or getattr(task, "retry_on_worker_lost", False))

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]
        if stored and self.unique_delivery is not None:
            self.unique_delivery.ends_as(End.SUCCESS)  # killed after its task's end
        return stored

    def _retry_worker_lost(self, *args: Any, **kwargs: Any) -> bool:
        delivery = self.unique_delivery
        if delivery is not None:
            # Published without the task's body, which would know its header.
            headers = self._context.headers or {}
            self._context.headers = {**headers, HEADER: delivery.header.as_message()}
        retried = bool(super()._retry_worker_lost(*args, **kwargs))  # type: ignore[misc]
        if retried and delivery is not None:
            delivery.requeued = True
        return retried

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        delivery = self.unique_delivery
        if delivery is not None:
            delivery.ends_as(End.REVOKED)
            delivery.release()
        with finishing():
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        if delivery is None or delivery.state is DeliveryState.DROPPED:
            return
        if expired and not delivery.unsettled:
            # Its lock has lapsed with it, but its followers need not wait until that is noticed.
            app_state, key = delivery.app_state, delivery.header.key
            app_state.in_background(lambda: reap_orphans(app_state, key))
        # A revoke is meant for all who follow the task. An expiry is not.
        delivery.settle_with(None if expired else Outcome.revoked(reason))
        if not (terminated or expired or delivery.started):
            # The revoke was recorded in the store as well, and its mark waits for this message.
            delivery.once_acknowledged(delivery.forget_mark)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """A shutdown, or a lost connection, took the running task away."""
        super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]
        delivery = self.unique_delivery
        if delivery is not None:
            delivery.ends_as(End.CANCELLED)
            delivery.requeued = delivery.requeued or bool(self.task.acks_late)
            delivery.keep_or_release()
            delivery.settle_with(None)


def _acks_on_timeout(task: Any) -> bool:
    if hasattr(Task, "acks_on_timeout"):  # since Celery 5.7
        return bool(task.acks_on_timeout)
    return bool(task.acks_on_failure_or_timeout)


def _plain(error: BaseException) -> BaseException:
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def use_unique_requests(app_state: AppState, task: Any) -> None:
    """Put the mixin in front of Celery's request class of a task, or of the user's own."""
    base = symbol_by_name(task.Request)
    if not issubclass(base, UniqueRequestMixin):
        own = {"__module__": __name__, "unique_app_state": app_state}
        base = task.Request = type("UniqueRequest", (UniqueRequestMixin, base), own)
    base.unique_guarded = app_state.is_guarded(task.name, task)
