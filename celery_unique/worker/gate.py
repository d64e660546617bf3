"""The gate: what a worker does with a unique message before its body runs.

May it run now, must it wait for another delivery of its id, or is it over? Asked once for
each message, in the worker's main loop, when Celery is about to hand it to the pool.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from celery.bootsteps import RUN
from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state as worker_state

from celery_unique import reporting
from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.complete import Outcome, complete, reason_of
from celery_unique.followers.continuations import finishing
from celery_unique.followers.promote import reap_orphans
from celery_unique.header import HEADER, DeliveryName, LockHeader
from celery_unique.publish.stored_meta import SUPERSEDED_BY
from celery_unique.stores.base import Started

from . import monitor_events
from .ack import Acknowledgement
from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")


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


def new_delivery(hostname: str | None) -> str:
    """A name that no other message received anywhere has: worker / process / boot / count."""
    return "/".join(
        DeliveryName(hostname or socket.gethostname(), str(os.getpid()), _BOOT, str(next(_counter)))
    )


class GatedRequest:
    """In front of Celery's ``Request``: asks the store before the pool gets the task."""

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
    _eventer: Any
    _context: Any

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
    _unique_waited = 0
    _unique_continues: bool | None = None
    _unique_received_at = 0.0
    _unique_connection = 0
    _unique_earlier: Any = None
    _unique_acknowledgement: Acknowledgement | None = None
    #: Why it does not run, for monitors.
    _unique_dropped_as = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header, wrong = LockHeader.read(self._request_dict.get(HEADER))
        if wrong:
            # Left in the message, for a retry that a newer worker may understand.
            reporting.unreadable_header(self._app, self.name, str(self.id), wrong)
        elif header is not None and header.task_id == self.id:
            self.unique_lock = replace(
                header.received_as(new_delivery(self.hostname)),
                watched=monitor_events.sends_events(self._eventer, self.task),
            )
            self._unique_received_at = time.monotonic()

    @property
    def _app_state(self) -> AppState:
        return state_of(self._app)

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
            if self.unique_lock is not None:
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
        holding = self._app_state.part(WorkerLockClient)
        try:
            # A retry often arrives while the body that sent it is still ending. No second
            # message of its own: asked without the mark that a twin would leave.
            sent_from_body = lock.sent_by and not self._may_exist_twice()
            if sent_from_body and holding.is_run_by_its_sender(lock):
                return Started("wait")
            return holding.start(lock, self.name, lock.delivery, bool(self.task.acks_late))
        except UnreadableRecord as error:
            # Nothing of this key can be renewed or released: it runs as a task without a lock,
            # whose header has no delivery, and a retry of it is asked for anew.
            reporting.store_error(self._app, "start", error, self.name, self.id, lock.key)
            self.unique_lock = None
            self._request_dict[HEADER] = replace(lock, delivery="").as_message()
            return Started("run")
        except StoreUnavailable as error:
            # The task was admitted when it was published: it is not lost over this.
            reporting.store_error(self._app, "start", error, self.name, self.id, lock.key)
            self.unique_blind = True
            return Started("run")

    def received_by(self, consumer: Any) -> None:
        """The message has arrived and its task is not revoked: the gate may be asked."""
        self.unique_consumer = consumer
        self._unique_connection = consumer.restart_count
        self._unique_earlier = self._delivered_earlier()

    def has_continuations(self) -> bool:
        """Whether somebody waits for what follows from this very message, or for its reply: then
        no other message can stand for it. Also where that cannot be read."""
        if self._unique_continues is None:
            self._unique_continues = self._read_continuations()
        return self._unique_continues

    def _read_continuations(self) -> bool:
        given = self._request_dict.get
        if self._app_state.results_by_message and not given("ignore_result"):
            return True
        try:
            _, _, embedded = self._payload  # type: ignore[attr-defined]
            continues = (embedded.get(name) for name in ("callbacks", "errbacks", "chain", "chord"))
            return bool(given("group") or any(continues))
        except (TypeError, ValueError, AttributeError):  # no message of Celery's own protocol
            return True

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
        if self._unique_acknowledgement is not None and self._unique_acknowledgement.failed:
            return True
        held_ms = (time.monotonic() - self._unique_received_at) * 1000
        if held_ms > self._app_state.leases.visibility_ms * NEARLY:
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
        self._tell_body(
            replace(
                lock,
                token=started.token,
                again=self._may_exist_twice(),
                watched=monitor_events.sends_events(self._eventer, self.task),
            )
        )
        self._app_state.part(WorkerLockClient).sent_to_pool(lock, self.name)

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
            reporting.held_back(self.name, self.id)
        self._unique_waited = min(self._unique_waited + 1, 16)  # a power of two

    def _drop_done(self) -> None:
        """This id has ended under another delivery: touch neither its result nor its state."""
        reporting.dropped(self.name, self.id, reason="it has already finished")
        worker_state.task_ready(self)
        super().acknowledge()  # type: ignore[misc]

    def _drop_superseded(self, started: Started) -> None:
        reason = reason_of(started.mark, started.by)
        if started.mark == "superseded" and self._is_in_canvas():
            self._follow_replacement(started.by, reason)
            return
        reporting.dropped(self.name, self.id, reason=reason)
        self._unique_dropped_as = reason
        self._context.__dict__[SUPERSEDED_BY] = started.by or None
        with finishing():
            super()._announce_revoked(reason, False, None, False)  # type: ignore[misc]
        self._once_acknowledged(self._forget_mark)

    def _is_in_canvas(self) -> bool:
        """Whether something goes on, or fails, with this very id."""
        try:
            context = self._context
        except Exception:
            logger.exception("the message of superseded task %s cannot be read here", self.id)
            return False
        waits = (context.chord, context.group, context.chain, context.callbacks, context.errbacks)
        return any(waits)

    def _follow_replacement(self, by: str, reason: str) -> None:
        """Its canvas would hang, or lose its tail: it gets the outcome of what took its place.

        The message is acknowledged when the store, or the result backend, has all of it.
        """
        app_state, lock = self._app_state, self.unique_lock
        assert lock is not None
        leases = app_state.leases
        try:
            call = FollowerCall.of_request(
                self._app, self, lock, grace_ms=leases.grace_ms, lease_ms=leases.queue_ms
            )
            if app_state.settings.conceal_holder:
                # The result of a stranger's call is none of its business.
                complete(self._app, call, Outcome.revoked(reason))
            else:
                message = call.dumps(app_state.settings.follower_codec)
                if not app_state.part(WorkerLockClient).follow(lock, self.name, message, by):
                    self._hold_back()
                    return
        except StoreUnavailable as error:
            reporting.store_error(self._app, "follow", error, self.name, self.id, lock.key)
            self._hold_back()
            return
        except Exception:
            logger.exception("superseded task %s does not follow yet; it is tried again", self.id)
            self._hold_back()
            return
        reporting.joined_replacement(self.name, self.id, by=by)
        self.send_event(monitor_events.DUPLICATE, result=reason)
        worker_state.task_ready(self)
        self._notice_acknowledgement()
        super().acknowledge()  # type: ignore[misc]
        self._once_acknowledged(self._forget_mark)
        # Where its replacement has ended already, nobody else would soon look.
        app_state.in_background(partial(reap_orphans, app_state, lock.key))

    def _forget_mark(self) -> None:
        if self.unique_lock is not None and not self._may_exist_twice():
            self._app_state.part(WorkerLockClient).dropped(self.unique_lock, self.name)

    def _notice_acknowledgement(self) -> None:
        """To be called before Celery is asked for it. One that is sent before the body runs is
        over when the body is. A solo worker sends every one after the body: its event loop
        stands still meanwhile."""
        late = not self.unique_started or self.task.acks_late or self._runs_in_the_event_loop()
        if late and self.unique_lock is not None and not self.acknowledged:
            self._unique_acknowledgement = Acknowledgement(self._message)

    def _runs_in_the_event_loop(self) -> bool:
        return isinstance(getattr(self.unique_consumer, "pool", None), SoloPool)

    def _once_acknowledged(self, act: Callable[[], None]) -> None:
        """Until then the message can come back."""
        if self._unique_acknowledgement is None:
            act()
        else:
            self._unique_acknowledgement.then(act)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  Celery's name for it
        if self.unique_lock is not None:
            if type == "task-started":  # until it has a result
                fields["result"] = monitor_events.shown_as_unique(self.unique_lock.key)
            elif type == "task-revoked" and self._unique_dropped_as:
                fields["result"] = self._unique_dropped_as
        super().send_event(type, **fields)  # type: ignore[misc]

    def on_accepted(self, *args: Any, **kwargs: Any) -> None:
        if self.unique_lock is not None:
            self._app_state.part(WorkerLockClient).taken_by_pool(self.unique_lock, self.name)
        super().on_accepted(*args, **kwargs)  # type: ignore[misc]


def _is_stopping(consumer: Any) -> bool:
    controller = consumer.controller
    return controller is not None and controller.blueprint.state != RUN
