"""The state of one message in this process, from its receipt until its lock is settled.

In the worker's main process Celery's ``Request`` carries it. A process of the pool makes one of
its own from the header of the message; threads and greenlets use that of the request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, StrEnum
from typing import Any

from celery.bootsteps import RUN
from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state as worker_state

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.complete import Outcome
from celery_unique.followers.promote import end_with_followers
from celery_unique.header import DeliveryName, LockHeader
from celery_unique.publish.stored_meta import HAS_STATE
from celery_unique.stores.base import Finished, ResultWrite
from celery_unique.stores.record import State

from .ack import RECORDED_BY, Acknowledgement, record_by_store
from .deliveries import REMEMBERED, Deliveries
from .lock_client import WorkerLockClient

#: While a body keeps the event loop waiting for so long, the connection may break unnoticed.
LONG_BODY_S = 10.0
#: An acknowledgement that is sent just before the visibility timeout arrives after it.
NEARLY = 0.9
#: Up to Celery 5.6, on a lost connection.
POOL_FORGETS = not hasattr(worker_state, "scheduled_requests")


class DeliveryState(StrEnum):
    RECEIVED = "received"  # in this worker; it may wait for its ETA or for a rate limit
    WAITING = "waiting"  # held back at the gate
    STARTED = "started"  # handed to the pool
    FINISHED = "finished"  # its lock was released, kept for the next message, or lost
    SETTLED = "settled"  # result and acknowledgement are out: the record may go
    DROPPED = "dropped"  # never runs: superseded, revoked, or done by another delivery


class Lock(Enum):
    """What becomes of the lock at an end."""

    RELEASE = "release"
    KEEP = "keep"
    HAND_OVER = "hand over"  # kept for another message of the same id


class End(Enum):
    """The ends of a task as Celery reports them, and what becomes of its lock: a released key is
    recorded in this final state."""

    SUCCESS = "success", Lock.RELEASE, State.COMPLETED
    # An exception, the last retry, a soft time limit, a result that cannot be stored.
    FAILURE = "failure", Lock.RELEASE, State.DISCARDED
    # A lost process, a hard time limit: if Celery does not requeue the message.
    KILLED = "killed", Lock.RELEASE, State.DISCARDED
    RETRY = "retry", Lock.KEEP, None
    # The body has sent the message in which its id continues.
    REPLACED = "replaced", Lock.HAND_OVER, None
    IGNORED = "ignored", Lock.RELEASE, State.CANCELLED
    REJECTED = "rejected", Lock.RELEASE, State.DISCARDED
    # With a late acknowledgement: by Reject, a lost process, a shutdown.
    REQUEUED = "requeued", Lock.KEEP, None
    # Also expired, terminated.
    REVOKED = "revoked", Lock.RELEASE, State.CANCELLED
    # By a shutdown, with an early acknowledgement: it never runs again.
    CANCELLED = "cancelled", Lock.RELEASE, State.CANCELLED
    # Unregistered, invalid, undecodable, or with an unusable ETA.
    UNUSABLE = "unusable", Lock.RELEASE, State.DISCARDED

    def __init__(self, _: str, lock: Lock, state: State | None) -> None:
        self.lock = lock
        self.state = state


class Delivery:
    """One message here. It refers to no Request: Celery frees those by their reference count."""

    # In the worker's main process only.
    received_in = 0  # its process id
    consumer: Any = None  # received the message; the gate opens only after that
    redelivered = False
    eventer: Any = None
    _connection = 0
    _received_at = 0.0
    #: The request of an earlier delivery of this id, which this worker runs.
    earlier: Any = None
    acknowledgement: Acknowledgement | None = None
    waited = 0  # times at the gate
    #: The delivery that it waits for.
    behind: DeliveryName | None = None
    #: A canvas or a caller waits for this very message; None: not looked at yet.
    has_continuations: bool | None = None
    #: It runs although the store did not answer at the gate.
    blind = False
    #: When its lease was last known to be alive, by the clock of this process.
    alive_at = 0.0
    #: Its pool has forgotten it, and its body has ended.
    seen_ending = False
    #: Why it does not run, for monitors.
    dropped_as = ""
    superseded_by: str | None = None
    requeued = False
    #: Its end was reported by Celery's request; a hard time limit is reported twice.
    _end_reported = False

    # Of its end.
    #: It was rejected for good: its message may come back from a dead letter exchange.
    rejected = False
    #: The final state, as far as it is known.
    outcome = State.COMPLETED
    #: Its lock is released, and the record waits for the result to be stored.
    unsettled = False
    #: It has followers: the record waits for them, too.
    followed = False
    #: What its body has called; callbacks and the next link are not among them.
    children: tuple[Any, ...] = ()
    #: How many calls it has answered; None before its end.
    duplicates: int | None = None
    #: Its body has ended so, and its lock is released with the write of the result: see
    #: ``publish.stored_meta``. Until then it is renewed.
    deferred: End | None = None
    #: Nothing was stored under its id so far, as far as this process knows.
    has_no_result = False
    #: Its id continues in a message that its body sent: so long until that is due.
    continues_in_ms: int | None = None

    def __init__(self, app_state: AppState, header: LockHeader, task: Any) -> None:
        self.app_state = app_state
        parts = app_state.parts
        self.client: WorkerLockClient = parts.get(WorkerLockClient) or app_state.part(
            WorkerLockClient
        )
        self._deliveries: Deliveries = parts.get(Deliveries) or app_state.part(Deliveries)
        self.header = header
        self.task = task
        self.started = False
        self.state = DeliveryState.STARTED

    @classmethod
    def received(cls, app_state: AppState, header: LockHeader, request: Any) -> Delivery:
        """In the worker's main process, where the message has just arrived."""
        delivery = cls(app_state, header, request.task)
        delivery.state = DeliveryState.RECEIVED
        delivery.received_in = os.getpid()
        delivery.redelivered = bool(request.delivery_info.get("redelivered"))
        delivery.eventer = request.eventer
        delivery._received_at = time.monotonic()
        return delivery

    @property
    def name(self) -> str:
        return self.header.delivery

    def received_by(self, consumer: Any) -> None:
        """The task is not revoked: the gate may be asked."""
        self.consumer = consumer
        self._connection = consumer.restart_count
        # Up to Celery 5.6 a pool that lost its connection forgets what it runs. While this
        # delivery waits, it keeps the other's request alive, so that its lease is renewed.
        self.earlier = worker_state.requests.get(self.header.task_id)
        earlier = getattr(self.earlier, "unique_delivery", None)
        if earlier is not None and not earlier.started:
            self.earlier = earlier.earlier

    # -- what is known of the message ------------------------------------------------------

    def may_exist_twice(self) -> bool:
        """Whether the broker has, or may have, delivered this message again, or a copy of it."""
        if self.redelivered or self.header.copies:
            return True
        if self.acknowledgement is not None and self.acknowledgement.failed:
            return True
        held_ms = (time.monotonic() - self._received_at) * 1000
        if held_ms > self.client.leases.visibility_ms * NEARLY:
            return True
        if self.consumer is None:
            return False
        if self.consumer.restart_count != self._connection:
            return True
        # A stopping worker's event loop has ended: acknowledgements of a thread pool wait there
        # until all of its tasks have ended.
        asked_to_stop = worker_state.should_stop is not None  # 0, an exit code
        return asked_to_stop or self.worker_is_stopping()

    def worker_is_stopping(self) -> bool:
        """Whether its pool takes nothing any more, and the message goes back to the queue."""
        controller = self.consumer.controller
        return controller is not None and controller.blueprint.state != RUN

    def is_forgotten(self) -> bool:
        """Whether Celery will not be notified of the end of this task, which runs."""
        if not POOL_FORGETS or not self.started:
            return False
        return bool(self.consumer.restart_count != self._connection)

    def runs_beside_the_gate(self) -> bool:
        """Whether its body runs in the worker's main process, and not in one of the pool."""
        return DeliveryName.parse(self.name).process == str(os.getpid())

    def is_taken_over(self, message: Any) -> bool:
        """Whether another worker now runs this very message.

        Redis keeps one entry for all deliveries of a message: acknowledged from here, the
        other worker's would be gone, and its death would leave a key that is never released.
        """
        if not (self.started and self.task.acks_late and hasattr(message.channel, "unacked_key")):
            return False
        return self.may_exist_twice() and self.client.is_taken_over(self.header)

    def was_skipped(self) -> bool:
        """Whether Celery acknowledges a redelivered task without running its body, since its
        success is stored already. Its end is not recorded then."""
        deduplicates = self.app_state.app.conf.worker_deduplicate_successful_tasks
        if not deduplicates or self.outcome is not State.COMPLETED:
            return False
        return self.may_exist_twice() and self.client.is_still_active(self.header)

    # -- start -----------------------------------------------------------------------------

    def start(self, token: int) -> None:
        """The gate lets it run: it goes to the pool."""
        header, on_the_way = self.header, self._deliveries.on_the_way
        header.token, header.again = token, self.may_exist_twice()
        header.watched = sends_events(self.eventer, self.task)
        self.started = True
        self.state = DeliveryState.STARTED
        on_the_way[header.delivery] = self
        if len(on_the_way) > REMEMBERED:
            on_the_way.popitem(last=False)

    def accepted(self, process: int) -> None:
        """A process of the pool has taken it, or a thread of this one."""
        self._deliveries.on_the_way.pop(self.name, None)
        if process != self.received_in:
            self._deliveries.body_began(self.header, self.task.name)

    # -- acknowledgement -------------------------------------------------------------------

    def notice_acknowledgement(self, message: Any) -> None:
        """To be called before Celery sends it. One that is sent before the body runs is done
        when the body ends. A solo worker sends every one after the body: its event loop stands
        still meanwhile."""
        if not self.started or self.task.acks_late or self._runs_in_the_event_loop():
            self.acknowledgement = Acknowledgement(message)

    def _runs_in_the_event_loop(self) -> bool:
        return isinstance(getattr(self.consumer, "pool", None), SoloPool)

    def once_acknowledged(self, act: Callable[[], None]) -> None:
        """Until then the message can come back."""
        if self.acknowledgement is None:
            act()
        else:
            self.acknowledgement.then(act)

    def is_unacknowledged(self) -> bool:
        """Whether its acknowledgement is still to be sent, although Celery has noted it, and may
        be too late or fail. After a short body nearly all arrive, and one act ends it."""
        noticed = self.acknowledgement
        if noticed is None or noticed.is_over:
            return False
        held_s = time.monotonic() - self._received_at
        return held_s > LONG_BODY_S or self.may_exist_twice()

    def acknowledged(self) -> None:
        """Celery has asked for the acknowledgement, or the message was rejected for good."""
        # With a late acknowledgement the record stays until now: a redelivery between
        # result and acknowledgement must still find it.
        if self.started and self.task.acks_late and self.state is not DeliveryState.SETTLED:
            if self.was_skipped():
                self.release()
                self.followed = False  # its result is stored: the reaper shares it
            if not self.followed:
                self.settle_once_acknowledged()

    def forget_mark(self) -> None:
        """Its message was reached and dropped, and does not come back."""
        if not self.may_exist_twice():
            self.client.forget(self.header, self.task.name)

    # -- end -------------------------------------------------------------------------------

    def defer(self, end: End, request: Any) -> bool:
        """Leave the release to the write of the result, if both can be one act."""
        if end not in (End.SUCCESS, End.FAILURE) or self.continues_in_ms is not None:
            return False
        # Callbacks and the next link are sent before the result, and may have the same key.
        if request.callbacks or request.chain or request.errbacks:
            return False
        if request.chord or request.group or not _is_stored(self.task, request, end):
            return False
        if not self.client.writes_results_of(self.task.backend):
            return False
        self.children = tuple(request.children)
        stored_before = request.retries or self.header.again or HAS_STATE in request.__dict__
        self.has_no_result = not stored_before
        self.deferred = end
        return True

    def finish_with_result(
        self, state: State, result: ResultWrite, *, backstop: bool = False
    ) -> bool:
        """The deferred release, with the result that is stored. False: the store did not write
        the result; the release is still to come if there is one already."""
        deferred, self.deferred = self.deferred, None
        settle_later = bool(self.task.acks_late) or self.is_unacknowledged()
        finished = self._finish(state, settle_later, backstop=backstop, result=result)
        self.has_no_result = False
        if finished is not None and finished.verdict == "stored":
            self.deferred = deferred
            return False
        # Not before: until the store has it, the lock is renewed.
        self.finished()
        if self.task.acks_late:
            self.unsettled = False  # the acknowledgement settles it
        return finished is not None

    def end_body(self, end: End, *, backstop: bool = False) -> None:
        """In the process that ran the body, or was to run it."""
        if self.continues_in_ms is not None:
            end = End.REPLACED
        self.deferred = None
        self.finished()
        if end.state is None:
            # A message that is not acknowledged yet can come back after the retry has ended.
            copies = bool(self.task.acks_late) or self.header.again
            copies = copies or (self.is_unacknowledged() and self.may_exist_twice())
            delay_ms = self.continues_in_ms or 0
            self.client.retry(self.header, self.task.name, delay_ms, copies=copies)
            return
        # What stays recorded after the end is settled when the result is stored: that may
        # fail, and turn a success into a failure.
        settle_later = self.task.acks_late or self.header.keep or self.is_unacknowledged()
        # Only known here to a store that is away now; else the worker says so, with settle.
        rejected = end is End.REJECTED and bool(self.task.acks_late)
        self._finish(end.state, bool(settle_later), backstop=backstop, rejected=rejected)
        if self.task.acks_late:
            self.unsettled = False  # the acknowledgement settles it

    def ends_as(self, end: End) -> None:
        """What Celery reports in the worker's main process, if it is not requeued."""
        self.outcome = end.state or self.outcome

    def release(self) -> None:
        """In the worker's main process: release the key, unless the body has."""
        if self._end_reported or self.state is DeliveryState.DROPPED:
            return
        self._end_reported = True
        self.deferred = None
        if self.state is DeliveryState.FINISHED:  # by the body, in a thread or greenlet
            self.unsettled = True
            return
        if not self.started:
            self.header.watched = sends_events(self.eventer, self.task)
        self.finished()
        self._finish(self.outcome, False, backstop=True, rejected=self.rejected)

    def keep(self) -> None:
        """The message goes back to the queue: the key stays, this delivery ends."""
        if self.started:
            self.continues()
            self.client.retry(self.header, self.task.name, 0, copies=True)

    def keep_or_release(self) -> None:
        if self.requeued:
            self.keep()
        else:
            self.release()

    def continues(self) -> None:
        """A retry, or a message that goes back to the queue: the key is not free."""
        self._deliveries.bodies.pop(self.name, None)

    def reject(self) -> None:
        """Its message was rejected, and may come back from a dead letter exchange."""
        self.rejected = True
        body = self._deliveries.bodies.get(self.name)
        if body is not None:
            body.rejected = True

    def finished(self) -> None:
        """Its lock is released, kept for another message, or lost: it is renewed no longer."""
        self.state = DeliveryState.FINISHED
        self._deliveries.bodies.pop(self.name, None)

    def _finish(
        self,
        outcome: State,
        settle_later: bool,
        *,
        backstop: bool = False,
        rejected: bool = False,
        result: ResultWrite | None = None,
    ) -> Finished | None:
        """Returns what the store has replied, None if it has not."""
        self.outcome = outcome
        if self.header.guard and not self.header.token:
            self._record_guard()
        finished = self.client.finish(
            self.header,
            self.task.name,
            outcome,
            settle_later=settle_later,
            acks_late=settle_later and bool(self.task.acks_late),
            backstop=backstop,
            rejected=rejected,
            result=result,
        )
        if finished is None:
            self.duplicates = 0
        elif finished.verdict != "stored":
            self.unsettled = finished.settle
            self.followed = finished.followers
            self.duplicates = finished.duplicates
        return finished

    def _record_guard(self) -> None:
        """It ran although the store did not answer at the gate, where its record is created: else
        its end would find none, and leave no mark."""
        if self.started or not self.received_in:
            with suppress(StoreUnavailable):
                self.client.catch_up(self.header, self.task.name, bool(self.task.acks_late))

    # -- settlement ------------------------------------------------------------------------

    def settle_with(self, outcome: Outcome | None) -> None:
        """In the worker's main process: let the record go; before that, the followers of the
        task get this outcome."""
        if not self.unsettled:
            return
        self.unsettled = False
        if not self.followed:
            self.settle_once_acknowledged()
            return
        self.followed = False
        app_state, settle = self.app_state, self.settle_once_acknowledged
        app_state.in_background(
            lambda: end_with_followers(app_state, self.header, self.task.name, outcome, settle)
        )

    def settle_once_acknowledged(self) -> None:
        # If the message may come back in any case, the mark that this leaves drops it.
        if self.may_exist_twice():
            self._settle_now()
        else:
            self._deliveries.unacknowledged.remember(self.name, self)
            self.once_acknowledged(self._settle_now)

    def _settle_now(self) -> None:
        self.settle(again=self.may_exist_twice())

    def settle(self, *, again: bool) -> None:
        """Result and acknowledgement are out."""
        self.state = DeliveryState.SETTLED
        self._deliveries.unacknowledged.pop(self.name, None)
        self.header.again = again
        self.client.settle(self.header, self.task.name, self.outcome, rejected=self.rejected)


def on_received(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Receives ``task_received``: the message is the worker's, and its task is not revoked."""
    delivery: Delivery | None = getattr(request, "unique_delivery", None)
    if delivery is not None:
        delivery.received_by(sender)
        channel = request._message.channel
        if getattr(channel, RECORDED_BY, None) is not delivery.client:
            record_by_store(channel, delivery.client, sender.hub)
        if delivery.app_state.register_waiting is not None:
            delivery.app_state.register_waiting(request)


def _is_stored(task: Any, request: Any, end: End) -> bool:
    """Whether Celery stores the result of this end: by the option of the call, or of the task."""
    option = request.__dict__.get("ignore_result")
    if not (task.ignore_result if option is None else option):
        return True
    return end is End.FAILURE and bool(task.store_errors_even_if_ignored)


def sends_events(eventer: Any, task: Any) -> bool:
    """Whether this worker sends the events of this task: Celery's own switches."""
    if eventer is None or not eventer.enabled or not task.send_events:
        return False
    return not eventer.groups or "task" in eventer.groups
