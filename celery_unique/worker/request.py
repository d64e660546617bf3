"""The ends of a unique message that only the worker's main process sees: a killed child, a
hard time limit, a revoke, a shutdown; and the acknowledgement after which its record may go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Task, states
from celery.exceptions import Ignore
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from kombu.transport.virtual import QoS as VirtualQoS

from celery_unique import reporting
from celery_unique.followers.complete import Outcome
from celery_unique.followers.continuations import finishing
from celery_unique.followers.promote import end_with_followers, reap_orphans
from celery_unique.header import HEADER
from celery_unique.publish.stored_meta import DUPLICATES
from celery_unique.stores.record import State

from .gate import GatedRequest
from .lock_client import WorkerLockClient

#: While a body keeps the event loop waiting for so long, the connection may break unnoticed.
LONG_BODY_S = 10.0

_KILLED = (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


class UniqueRequestMixin(GatedRequest):
    """In front of Celery's ``Request``, for tasks of an installed app."""

    _unique_requeued = False
    #: It was rejected for good: its message may come back from a dead letter exchange.
    _unique_rejected = False
    _unique_end = State.COMPLETED
    _unique_given_back = False
    #: Its end was told from here, and the record waits for the result to be stored.
    _unique_unsettled = False
    #: Somebody follows it: the record waits for them, too.
    _unique_followed = False

    def on_retry(self, exc_info: Any) -> Any:
        if self.unique_lock is not None:
            self._app_state.part(WorkerLockClient).ends.goes_on(self.unique_lock.delivery)
        return super().on_retry(exc_info)  # type: ignore[misc]

    def acknowledge(self) -> None:
        if self._is_taken_over():
            self._leave_message()
        else:
            self._notice_acknowledgement()
            super().acknowledge()  # type: ignore[misc]
        self._settle_late()
        self._note_copies()

    def _is_taken_over(self) -> bool:
        """Whether this very message is the one that another worker now runs.

        Redis keeps one entry for all deliveries of a message: acknowledged from here, the
        other worker's would be gone, and its death would leave a key that nobody frees.
        """
        if self.acknowledged or not (self.unique_started and self.task.acks_late):
            return False
        if self.unique_lock is None or not hasattr(self._message.channel, "unacked_key"):
            return False
        return self._may_exist_twice() and self._app_state.part(WorkerLockClient).is_taken_over(
            self.unique_lock
        )

    def _leave_message(self) -> None:
        reporting.taken_over(self.name, self.id)
        # Forgotten in this process, kept in Redis.
        forget: Any = VirtualQoS.ack
        forget(self._message.channel.qos, self._message.delivery_tag)
        self.acknowledged = True

    def _note_copies(self) -> None:
        # It waited for a thread of the pool for so long that it was delivered again:
        # the body, which is still to come, must leave a done mark.
        lock = self.unique_lock
        early = self.unique_started and not self.task.acks_late
        if early and lock is not None and not lock.again and self._may_exist_twice():
            self._tell_body(replace(lock, again=True))

    def reject(self, requeue: bool = False) -> None:
        self._unique_requeued = self._unique_requeued or requeue
        if not (requeue or self.acknowledged or self.unique_lock is None):
            self._unique_rejected = True
            self._app_state.part(WorkerLockClient).ends.rejected(self.unique_lock.delivery)
        self._notice_acknowledgement()
        super().reject(requeue=requeue)  # type: ignore[misc]
        if requeue:
            return
        # Celery cannot make sense of its ETA. (Up to 5.6 it runs the task at once.)
        if not self.unique_started and hasattr(worker_state, "task_scheduled"):
            self._unique_end = State.DISCARDED
            self._give_back()
            self._settle_if_unsettled()
        self._settle_late()

    def _settle_late(self) -> None:
        # With a late acknowledgement the record stays until now: a redelivery between
        # result and acknowledgement must still find it.
        if self.unique_started and self.task.acks_late:
            if self._was_skipped():
                self._give_back()
                self._unique_followed = False  # its result is stored: whoever looks shares it
            if not self._unique_followed:
                self._settle_once_acknowledged()

    def _was_skipped(self) -> bool:
        """Whether Celery acknowledges a redelivered task without running its body, since
        its success is stored already. Nobody has told its end then."""
        deduplicates = self._app.conf.worker_deduplicate_successful_tasks
        if not deduplicates or self._unique_end is not State.COMPLETED:
            return False
        lock = self.unique_lock
        return (
            lock is not None
            and self._may_exist_twice()
            and self._app_state.part(WorkerLockClient).is_still_active(lock)
        )

    def is_unacknowledged(self) -> bool:
        """Whether its acknowledgement is still to be sent, although Celery has asked for it, and
        may be too late or fail. After a short body nearly all arrive, and one act ends it."""
        noticed = self._unique_acknowledgement
        if noticed is None or noticed.is_over:
            return False
        held_s = time.monotonic() - self._unique_received_at
        return held_s > LONG_BODY_S or self._may_exist_twice()

    def may_exist_twice(self) -> bool:
        return self._may_exist_twice()

    def settle_early(self, state: State) -> None:
        """The result of an early acknowledged task is stored, its acknowledgement is not sent."""
        self._unique_end = state
        self._settle_once_acknowledged()

    def _settle_once_acknowledged(self) -> None:
        # If the message may come back in any case, the mark that this leaves drops it.
        if self.unique_lock is not None and not self._may_exist_twice():
            self._app_state.part(WorkerLockClient).waits_for_acknowledgement(self.unique_lock)
            self._once_acknowledged(self._settle)
        else:
            self._settle()

    def _settle(self) -> None:
        if self.unique_lock is not None:
            lock = replace(self.unique_lock, again=self._may_exist_twice())
            self._app_state.part(WorkerLockClient).settle(
                lock, self.name, self._unique_end, rejected=self._unique_rejected
            )

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        error = _plain(exc_info.exception)
        self._unique_end = State.CANCELLED if isinstance(error, Ignore) else State.DISCARDED
        if not isinstance(error, _KILLED):
            with finishing():
                return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]
        timed_out = isinstance(error, TimeLimitExceeded)
        with self._killed(error, may_go_on=self._may_go_on(timed_out)):
            return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        if soft:
            return super().on_timeout(soft, timeout)  # type: ignore[misc]
        self._unique_end = State.DISCARDED
        error = TimeLimitExceeded(timeout)
        with self._killed(error, may_go_on=self._may_go_on(timed_out=True)):
            return super().on_timeout(soft, timeout)  # type: ignore[misc]

    @contextmanager
    def _killed(self, error: BaseException, *, may_go_on: bool) -> Iterator[None]:
        """Around what Celery does about a task whose process was killed."""
        may_go_on = may_go_on or self._unique_requeued  # a shutdown has cancelled it before
        if not may_go_on:
            self._give_back()  # gone for good: before the result is seen
        try:
            with finishing():
                yield
        finally:
            if may_go_on:
                self._keep_or_give_back()
            # A success that was stored before is shared as it is stored.
            failed = self._unique_end is State.DISCARDED
            self._settle_if_unsettled(Outcome(states.FAILURE, error) if failed else None)

    def _may_go_on(self, timed_out: bool) -> bool:
        """Whether Celery may send a task whose process was killed to a worker again."""
        task = self.task
        if timed_out:
            return bool(task.acks_late and not _acks_on_timeout(task))
        requeued = task.acks_late and task.reject_on_worker_lost
        return bool(requeued or getattr(task, "retry_on_worker_lost", False))

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]
        if stored:  # the process was killed after its task's end
            self._unique_end = State.COMPLETED
        return stored

    def _retry_worker_lost(self, *args: Any, **kwargs: Any) -> bool:
        if self.unique_lock is not None:
            # Published without the task's body, which would know its header.
            headers = self._context.headers or {}
            self._context.headers = {**headers, HEADER: self.unique_lock.as_message()}
        retried = super()._retry_worker_lost(*args, **kwargs)  # type: ignore[misc]
        if retried:
            self._unique_requeued = True
        return bool(retried)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        self._unique_end = State.CANCELLED
        self._give_back()
        with finishing():
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        if expired and not self._unique_unsettled and self.unique_lock is not None:
            # Its lock has lapsed with it, but who follows it need not wait for that to be seen.
            app_state, key = self._app_state, self.unique_lock.key
            app_state.in_background(lambda: reap_orphans(app_state, key))
        # Revoked by somebody, it is so for all who follow it. Nobody wanted it to expire.
        self._settle_if_unsettled(None if expired else Outcome.revoked(reason))
        if not (terminated or expired or self.unique_started):
            # The store was told of the revoke as well, and its mark waits for this message.
            self._once_acknowledged(self._forget_mark)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """A shutdown, or a lost connection, took the running task away."""
        super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]
        self._unique_end = State.CANCELLED
        self._unique_requeued = self._unique_requeued or bool(self.task.acks_late)
        self._keep_or_give_back()
        self._settle_if_unsettled()

    def _keep_or_give_back(self) -> None:
        if self._unique_requeued:
            self._let_go()
        else:
            self._give_back()

    def _give_back(self) -> None:
        lock, holding = self.unique_lock, self._app_state.part(WorkerLockClient)
        if lock is None or self._unique_given_back:  # a hard time limit is reported twice
            return
        self._unique_given_back = True
        if holding.has_ended_here(lock.delivery):  # told by the body, in a thread or greenlet
            self._unique_unsettled = True
            return
        rejected = self._unique_rejected
        finished = holding.finish(
            lock, self.name, self._unique_end, backstop=True, rejected=rejected
        )
        self._unique_unsettled = finished.settle
        self._unique_followed = finished.followers
        self._context.__dict__[DUPLICATES] = finished.duplicates

    def _settle_if_unsettled(self, outcome: Outcome | None = None) -> None:
        """Let the record go; before that, whoever follows the task gets this outcome."""
        if not self._unique_unsettled:
            return
        self._unique_unsettled = False
        lock = self.unique_lock
        if not self._unique_followed or lock is None:
            self._settle_once_acknowledged()
            return
        self._unique_followed = False
        app_state, settle = self._app_state, self._settle_once_acknowledged
        app_state.in_background(
            lambda: end_with_followers(app_state, lock, self.name, outcome, settle)
        )

    def _let_go(self) -> None:
        """The message goes back to the queue: the key stays, this delivery is over."""
        if self.unique_lock is not None and self.unique_started:
            self._app_state.part(WorkerLockClient).retried(
                self.unique_lock, self.name, 0, copies=True
            )


def _acks_on_timeout(task: Any) -> bool:
    if hasattr(Task, "acks_on_timeout"):  # since Celery 5.7
        return bool(task.acks_on_timeout)
    return bool(task.acks_on_failure_or_timeout)


def _plain(error: BaseException) -> BaseException:
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


@cache
def unique_request_class(base: type) -> type:
    """Celery's request class of a task, or the user's own, with the gate in front."""
    if issubclass(base, UniqueRequestMixin):
        return base
    return type("UniqueRequest", (UniqueRequestMixin, base), {"__module__": __name__})


def give_gate(task: Any) -> None:
    task.Request = unique_request_class(symbol_by_name(task.Request))
