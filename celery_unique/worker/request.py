"""The worker's view of one unique message: the gate before it, and the ends that only
the main process sees (a killed child, a hard time limit, a revoke, a shutdown)."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Task, states
from celery.bootsteps import RUN
from celery.exceptions import Ignore
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from kombu.transport.virtual import QoS as VirtualQoS

from celery_unique import reports
from celery_unique.completing import Outcome
from celery_unique.continuations import finishing
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER, LockHeader
from celery_unique.runtime import Runtime, runtime_of
from celery_unique.sharing import end_with_followers, look_after
from celery_unique.stores.base import Started
from celery_unique.stores.record import State
from celery_unique.superseding import reason_of

#: Differs between two lives of a worker with the same name and process id.
_BOOT = f"{time.time_ns():x}"
_counter = itertools.count()

#: How long a held back delivery waits before it asks the gate again: twice as long each
#: time, since a retry waits for milliseconds and a twin for the end of a long task.
ASK_AGAIN_AFTER_S = 0.02
ASK_AGAIN_AFTER_AT_MOST_S = 1.0

#: Up to Celery 5.6, on a lost connection.
POOL_FORGETS = not hasattr(worker_state, "scheduled_requests")

#: An acknowledgement that is sent just before the visibility timeout arrives after it.
NEARLY = 0.9

_KILLED = (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


def new_delivery(hostname: str | None) -> str:
    """A name that no other message received anywhere has: worker / process / boot / count."""
    return f"{hostname or socket.gethostname()}/{os.getpid()}/{_BOOT}/{next(_counter)}"


class UniqueRequestMixin:
    """In front of Celery's ``Request``, for tasks of an installed app."""

    # Celery's request: here for the type checker.
    id: str
    task: Any
    name: str
    hostname: str
    _app: Any
    _request_dict: dict[str, Any]
    delivery_info: dict[str, Any]
    acknowledged: bool
    _message: Any

    unique_lock: LockHeader | None = None
    #: The consumer that received this message; the gate opens only after that.
    unique_consumer: Any = None
    unique_started = False
    #: It runs although the store did not answer at the gate.
    unique_blind = False
    #: Its pool has forgotten it, and its body has ended.
    unique_seen_ending = False
    #: When its lease was last known to be alive, by the clock of this process.
    unique_alive_at = 0.0
    _unique_requeued = False
    _unique_end = State.COMPLETED
    _unique_given_back = False
    #: Its end was told from here, and the record waits for the result to be stored.
    _unique_unsettled = False
    #: Somebody follows it: the record waits for them, too.
    _unique_followed = False
    _unique_waited = 0
    _unique_received_at = 0.0
    _unique_connection = 0
    _unique_earlier: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header = LockHeader.from_message(self._request_dict.get(HEADER))
        if header is not None and header.task_id == self.id:
            self.unique_lock = replace(header, delivery=new_delivery(self.hostname), again=False)
            self._unique_received_at = time.monotonic()

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self._app)

    # -- the gate ------------------------------------------------------------

    def revoked(self) -> bool:
        """Celery's last question before it hands the task to the pool."""
        if super().revoked():  # type: ignore[misc]
            return True
        # Celery also asks on arrival, perhaps long before the ETA: not a start yet.
        if self.unique_lock is None or self.unique_consumer is None or self.unique_started:
            return False
        if _is_stopping(self.unique_consumer):
            # Its pool takes nothing any more: the message goes back to the queue, and
            # would be held up there by a start that led to nothing.
            return True
        self.unique_alive_at = time.monotonic()
        started = self._ask_gate(self.unique_lock)
        if started.verdict == "run":
            self._let_run(self.unique_lock, started)
            return False
        if started.verdict == "wait":
            self._hold_back()
        elif started.verdict == "done":
            self._drop_done()
        else:
            self._drop_superseded(started)
        return True

    def _ask_gate(self, lock: LockHeader) -> Started:
        holding = self._runtime.holding
        try:
            # A retry often arrives while the body that sent it is still ending. No second
            # message of its own: asked without the mark that a twin would leave.
            sent_from_body = lock.sent_by and not self._may_exist_twice()
            if sent_from_body and holding.is_run_by_its_sender(lock):
                return Started("wait")
            return holding.start(lock, self.name, lock.delivery, bool(self.task.acks_late))
        except StoreUnavailable as error:
            # The task was admitted when it was published: it is not lost over this.
            reports.store_error(self._app, "start", error, self.name, self.id, lock.key)
            self.unique_blind = True
            return Started("run")

    def received_by(self, consumer: Any) -> None:
        """The message has arrived and its task is not revoked: the gate may be asked."""
        self.unique_consumer = consumer
        self._unique_connection = consumer.restart_count
        self._unique_earlier = self._delivered_earlier()

    def _delivered_earlier(self) -> Any:
        """Another delivery of this id that this worker runs.

        Up to Celery 5.6 a pool that lost its connection forgets what it runs. While this
        delivery waits, it keeps the other's request alive, so that its lease is renewed.
        """
        earlier = worker_state.requests.get(self.id)
        if getattr(earlier, "unique_started", True):
            return earlier
        return earlier._unique_earlier

    def is_forgotten(self) -> bool:
        """Whether Celery will not hear of the end of this task, which runs."""
        if not POOL_FORGETS or not self.unique_started:
            return False
        return bool(self.unique_consumer.restart_count != self._unique_connection)

    def _may_exist_twice(self) -> bool:
        """Whether the broker has, or may have, delivered this message again."""
        if self.delivery_info.get("redelivered"):
            return True
        held_ms = (time.monotonic() - self._unique_received_at) * 1000
        if held_ms > self._runtime.holding.leases.visibility_ms * NEARLY:
            return True
        consumer = self.unique_consumer
        if consumer is None:
            return False
        if consumer.restart_count != self._unique_connection:
            return True
        # A stopping worker's event loop is over: acknowledgements of a thread pool wait there
        # until all of its tasks have ended.
        asked_to_stop = worker_state.should_stop is not None  # 0, an exit code
        return asked_to_stop or _is_stopping(consumer)

    def _let_run(self, lock: LockHeader, started: Started) -> None:
        self.unique_started = True
        self._tell_body(replace(lock, token=started.token, again=self._may_exist_twice()))
        self._runtime.holding.sent_to_pool(lock, self.name)

    def _tell_body(self, lock: LockHeader) -> None:
        self.unique_lock = lock
        self._request_dict[HEADER] = lock.as_message()

    def _hold_back(self) -> None:
        """As Celery holds an ETA: no pool slot, no retry counted, looked at again."""
        consumer = self.unique_consumer
        consumer.qos.increment_eventually()
        pause_s = min(ASK_AGAIN_AFTER_S * 2**self._unique_waited, ASK_AGAIN_AFTER_AT_MOST_S)
        entry = consumer.timer.call_after(pause_s, consumer.apply_eta_task, (self,), priority=6)
        self._eta_timer_entry = entry
        worker_state.reserved_requests.discard(self)
        if hasattr(worker_state, "task_scheduled"):  # since Celery 5.7
            worker_state.task_scheduled(self)
        if not self._unique_waited:
            reports.held_back(self.name, self.id)
        self._unique_waited = min(self._unique_waited + 1, 16)  # a power of two

    def _drop_done(self) -> None:
        """This id has ended under another delivery: touch neither its result nor its state."""
        reports.dropped(self.name, self.id, "it has already ended")
        worker_state.task_ready(self)
        super().acknowledge()  # type: ignore[misc]

    def _drop_superseded(self, started: Started) -> None:
        reason = reason_of(started.mark, started.by)
        reports.dropped(self.name, self.id, reason)
        with finishing():
            super()._announce_revoked(reason, False, None, False)  # type: ignore[misc]
        # After the acknowledgement: until then the message can come back.
        if self.unique_lock is not None and not self._may_exist_twice():
            self._runtime.holding.dropped(self.unique_lock, self.name)

    def on_accepted(self, *args: Any, **kwargs: Any) -> None:
        if self.unique_lock is not None:
            self._runtime.holding.taken_by_pool(self.unique_lock, self.name)
        super().on_accepted(*args, **kwargs)  # type: ignore[misc]

    def on_retry(self, exc_info: Any) -> Any:
        if self.unique_lock is not None:
            self._runtime.holding.ends.goes_on(self.unique_lock.delivery)
        return super().on_retry(exc_info)  # type: ignore[misc]

    # -- ends that the body does not see ---------------------------------------

    def acknowledge(self) -> None:
        if self._is_taken_over():
            self._leave_message()
        else:
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
        return self._may_exist_twice() and self._runtime.holding.is_taken_over(self.unique_lock)

    def _leave_message(self) -> None:
        reports.left_to_another(self.name, self.id)
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
                self._settle()

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
            and self._runtime.holding.is_still_active(lock)
        )

    def _settle(self) -> None:
        if self.unique_lock is not None:
            lock = replace(self.unique_lock, again=self._may_exist_twice())
            self._runtime.holding.settle(lock, self.name, self._unique_end)

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
            runtime, key = self._runtime, self.unique_lock.key
            runtime.in_background(lambda: look_after(runtime, key))
        # Revoked by somebody, it is so for all who follow it. Nobody wanted it to expire.
        self._settle_if_unsettled(None if expired else Outcome.revoked(reason))

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
        lock, holding = self.unique_lock, self._runtime.holding
        if lock is None or self._unique_given_back:  # a hard time limit is reported twice
            return
        self._unique_given_back = True
        if holding.has_ended_here(lock.delivery):  # told by the body, in a thread or greenlet
            self._unique_unsettled = True
            return
        finished = holding.finish(lock, self.name, self._unique_end, backstop=True)
        self._unique_unsettled = finished.settle
        self._unique_followed = finished.followers

    def _settle_if_unsettled(self, outcome: Outcome | None = None) -> None:
        """Let the record go; before that, whoever follows the task gets this outcome."""
        if not self._unique_unsettled:
            return
        self._unique_unsettled = False
        lock = self.unique_lock
        if not self._unique_followed or lock is None:
            self._settle()
            return
        self._unique_followed = False
        runtime, settle = self._runtime, self._settle
        runtime.in_background(lambda: end_with_followers(runtime, lock, self.name, outcome, settle))

    def _let_go(self) -> None:
        """The message goes back to the queue: the key stays, this delivery is over."""
        if self.unique_lock is not None and self.unique_started:
            self._runtime.holding.retried(self.unique_lock, self.name, 0, copies=True)


def _is_stopping(consumer: Any) -> bool:
    controller = consumer.controller
    return controller is not None and controller.blueprint.state != RUN


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
