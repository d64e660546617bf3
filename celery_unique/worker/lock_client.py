"""The worker's operations on the lock store.

Each compares and sets on (task id, delivery). What must not be lost while the store is unavailable
is retried in the background.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from celery_unique import reporting
from celery_unique.config.app_state import AppState, state_of
from celery_unique.config.leases import Leases, moment_of
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.followers.promote import publish_called
from celery_unique.header import DeliveryName, LockHeader
from celery_unique.publish import stored_meta
from celery_unique.publish.atomic import leads_to
from celery_unique.stores.base import (
    BrokerStore,
    Claim,
    Finish,
    Finished,
    LockStore,
    ResultWrite,
    Start,
    Started,
)
from celery_unique.stores.circuit_breaker import Breaker, Breakers, StoreSkipped
from celery_unique.stores.record import State, TaskEntry
from celery_unique.stores.retry_queue import RetryQueue

from .monitor_events import DuplicateEvents

logger = logging.getLogger("celery_unique")

#: How long the acknowledgement of a task whose end was recorded late has time to settle it: with a
#: mark if the message may come back.
SETTLE_ANYWAY_S = 5.0

Reply = TypeVar("Reply")


class WorkerLockClient:
    def __init__(self, app: Any, store: LockStore, gate_store: LockStore, leases: Leases) -> None:
        self.app = app
        self.store = store
        self.leases = leases
        self.retry_queue = RetryQueue(store)
        self.events = DuplicateEvents(app)
        self._gate_store = gate_store
        self._gate_breakers = Breakers(gate_store)
        self._breakers = Breakers(store)
        self._renewal_failed_at = -math.inf
        #: The result backend that was last looked at, and whether the store can write to it.
        self._writes_results: tuple[Callable[[], Any], bool] = (_none, False)
        #: Fingerprints that callers have sent, each compared once with this store's.
        self._compared_stores: set[str] = set()

    @classmethod
    def of(cls, app_state: AppState) -> WorkerLockClient:
        client = cls(app_state.app, app_state.store, app_state.gate_store, app_state.leases)
        client.events.most_rows = app_state.settings.monitor_rows
        client.retry_queue.timeout_s = app_state.settings.store_timeout.total_seconds()
        return client

    def flush(self) -> None:
        self.events.flush()

    @property
    def failed_at(self) -> float:
        """When the store last did not answer this process."""
        breakers = (self._gate_breakers, self._breakers)
        return max(self._renewal_failed_at, *(each.failed_at for each in breakers))

    def renewal_failed(self) -> None:
        self._renewal_failed_at = time.monotonic()

    def _run(
        self, breakers: Breakers, act: Callable[..., Reply], key: str, *arguments: Any
    ) -> Reply:
        """``act`` of the store on the key, through its circuit breaker."""
        breaker = breakers.only or breakers.of(key)
        if breaker.failures:
            return breaker.run(partial(act, key, *arguments))
        try:
            return act(key, *arguments)
        except StoreUnavailable as error:
            breaker.count(error)
            raise

    # -- at the gate: short time-outs, and errors are the gate's to handle -------------------

    def start(self, header: LockHeader, task_name: str, acks_late: bool) -> Started:
        start = self._start(header, task_name, acks_late)
        started = self._run(self._gate_breakers, self._gate_store.start, header.key, start)
        if header.store and header.store not in self._compared_stores:
            self._compare_stores(header, task_name, found=not started.lost)
        if started.verdict == "run" and logger.isEnabledFor(reporting.started.level):
            reporting.started(task_name, header.task_id, key=header.key)
        # A guard begins with the start; only a retry of a guarded task has a lock before.
        if started.lost and (not header.guard or header.sent_by):
            self._lost(header, task_name, "its lock had lapsed before it started")
        return started

    def _compare_stores(self, header: LockHeader, task_name: str, *, found: bool) -> None:
        """A caller with another store or namespace takes locks that this worker never sees.

        A fingerprint is made of an address, and one store may have several. The caller's lock,
        found here under its key and id, proves that its store is this one.
        """
        self._compared_stores.add(header.store)
        if not found and header.store != self.store.fingerprint():
            reporting.other_store(task_name, header.task_id)

    def is_run_by_its_sender(self, header: LockHeader) -> bool:
        """Whether the body that published this message (its retry) has not ended yet."""
        task, now = self._gate_entry(header)
        if task is None or task.delivery != header.sent_by:
            return False
        return task.delivery_lease > now and not task.terminal

    def is_taken_over(self, header: LockHeader) -> bool:
        """Whether another delivery runs this task now, since our lease lapsed."""
        try:
            task, _ = self._gate_entry(header)
        except StoreUnavailable as error:
            reporting.store_error(self.app, "read", error, "", header.task_id, header.key)
            return False
        return task is not None and task.running and task.delivery != header.delivery

    def blocker(self, header: LockHeader) -> tuple[DeliveryName | None, str]:
        """The other delivery of a held back message that runs it, if any; and until when the
        message waits, in words."""
        record, _ = self._run(self._gate_breakers, self._gate_store.read, header.key)
        own = record.tasks.get(header.task_id)
        task = own if own is None or own.delivery else record.tasks.get(own.after)
        if task is None or not task.delivery or task.delivery == header.delivery:
            return None, "its end"
        delivery = DeliveryName.parse(task.delivery)
        ends_at = f"{moment_of(task.delivery_lease):%Y-%m-%d %H:%M:%S} UTC"
        until = f"its end in worker {delivery.worker}, or {ends_at} if that has died"
        return delivery if task is own else None, until

    def end_delivery(self, header: LockHeader, task_name: str, dead: DeliveryName) -> None:
        """End the delivery lease of a worker that has died: the message that this header is of
        need not wait for it."""
        task, _ = self._gate_entry(header)
        if task is None or not task.running or task.delivery != str(dead):
            return
        leases, retry = self.leases, self._gate_store.retry
        arguments = (header.task_id, task.delivery, leases.queue_ms, True)
        self._run(self._gate_breakers, retry, header.key, *arguments)
        worker, pid = dead.worker, dead.process
        reporting.ended_delivery(task_name, header.task_id, worker=worker, pid=pid)

    def _gate_entry(self, header: LockHeader) -> tuple[TaskEntry | None, int]:
        record, now = self._run(self._gate_breakers, self._gate_store.read, header.key)
        return record.tasks.get(header.task_id), now

    def follow(self, header: LockHeader, task_name: str, message: str, holder_id: str) -> bool:
        """Make a superseded task, whose whole message this is, a follower of its replacement.
        False: it is a task of the key again, and comes to the gate again.

        Raises StoreUnavailable: then the message must not be acknowledged.
        """
        claim = _to_follow(header, task_name, message)
        follow = self._gate_store.follow
        return self._run(self._gate_breakers, follow, header.key, claim, holder_id)

    # -- while it runs ------------------------------------------------------------------------

    def follow_again(
        self, header: LockHeader, task_name: str, message: str, holder_id: str
    ) -> bool:
        """Attach a follower that the store has lost. False: it is a task of its key."""
        return self.store.follow(header.key, _to_follow(header, task_name, message), holder_id)

    def catch_up(self, header: LockHeader, task_name: str, acks_late: bool) -> bool:
        """Record a task that started while the store was unavailable. Whether it has its lock.

        Until then its key is held as that of a waiting task: for very long, if its worker dies.
        """
        record, _ = self._run(self._breakers, self.store.read, header.key)
        task = record.tasks.get(header.task_id)
        if (task is None and not header.guard) or (task is not None and task.terminal):
            return False  # it has ended meanwhile, or else its end will find that it lapsed
        start = self._start(header, task_name, acks_late)
        started = self._run(self._breakers, self.store.start, header.key, start)
        if started.verdict != "run":
            self._lost(
                header, task_name, "it started without the store, and its lock is not its own"
            )
        return started.verdict == "run"

    def _start(self, header: LockHeader, task_name: str, acks_late: bool) -> Start:
        return Start(
            task_id=header.task_id,
            delivery=header.delivery,
            task_name=task_name,
            # An early acknowledged message is gone once the body runs, so nothing but
            # the worker's renewals may keep the key.
            lease_ms=self.leases.queue_ms if acks_late else self.leases.run_ms,
            run_lease_ms=self.leases.run_ms,
            mark_ms=self.leases.queue_ms,
            created_at=header.created_at,
            window_ms=header.window_ms,
            keep=header.keep,
            arguments=header.arguments,
            merge=header.merge,
        )

    def is_still_active(self, header: LockHeader) -> bool:
        """Whether the end of this delivery is not recorded, as far as can be seen."""
        try:
            task = self._entry(header)
        except StoreUnavailable:
            return True  # recorded twice, it does no harm
        return task is not None and task.running and task.delivery == header.delivery

    def _entry(self, header: LockHeader) -> TaskEntry | None:
        record, _ = self.store.read(header.key)
        return record.tasks.get(header.task_id)

    def lapsed(self, header: LockHeader, task_name: str) -> None:
        self._lost(header, task_name, "its lock lapsed while it was running")

    def _lost(self, header: LockHeader, task_name: str, reason: str) -> None:
        reporting.lost(task_name, header.task_id, app=self.app, key=header.key, reason=reason)

    # -- its end ------------------------------------------------------------------------------

    def retry(self, header: LockHeader, task_name: str, delay_ms: int, *, copies: bool) -> None:
        """The task waits for its next message: the lock stays, the delivery releases it."""
        lease_ms = self.leases.queue_ms + delay_ms
        act = partial(
            self.store.retry, header.key, header.task_id, header.delivery, lease_ms, copies
        )
        self._run_or_retry("retry", header, task_name, act)

    def finish(
        self,
        header: LockHeader,
        task_name: str,
        state: State,
        *,
        settle_later: bool = False,
        acks_late: bool = False,
        backstop: bool = False,
        rejected: bool = False,
        result: ResultWrite | None = None,
    ) -> Finished | None:
        """The body has ended: release the key, now, or as soon as the store answers (None).

        ``acks_late``: the acknowledgement is still to come, and is settled by another call. A
        backstop may be the second release: it is no news if nothing is left. A message
        that is rejected may come back from a dead letter exchange: then it runs. ``result`` is
        written in the same act; where one is stored already, that may change nothing.
        """
        finish = self._finish(header, state, settle_later, rejected)
        try:
            if result is None:
                finished = self._run(self._breakers, self.store.finish, header.key, finish)
            else:
                act = cast("BrokerStore", self.store).finish_with_result
                finished = self._run(self._breakers, act, header.key, finish, result)
        except StoreUnavailable as error:
            # A time-out may have finished it: then there is nothing left, which is no news. Neither
            # is it where the acknowledgement has ended it.
            finish.again = backstop or acks_late or not isinstance(error, StoreSkipped)
            late = partial(self._finish_late, header, task_name, finish, acks_late)
            self._retry_later("finish", error, header, task_name, late)
            return None
        if finished.verdict == "ended" or (finished.verdict == "not_yours" and not backstop):
            self._report_finished(header, task_name, finish, finished)
        elif finished.verdict == "not_yours" and not header.token and self._is_recorded(header):
            # Its message is gone, and the lock is another delivery's: of a body that is still
            # ending, which has sent this as its retry, or of a worker that has died.
            self._outlive_the_dead(header, task_name, finish)
        return finished

    def _is_recorded(self, header: LockHeader) -> bool:
        """Whether there is a lock of this task, as far as can be seen."""
        try:
            return self._entry(header) is not None
        except StoreUnavailable:
            return True

    def at_broker(self, channel: Any) -> tuple[BrokerStore, Breaker] | None:
        """The gate's store and its circuit breaker, if this channel of the broker leads to the
        same place."""
        breaker = self._gate_breakers.only
        if breaker is None or getattr(self._gate_store, "address", None) is None:
            return None
        is_here = leads_to(channel, self._gate_store)
        return (cast("BrokerStore", self._gate_store), breaker) if is_here else None

    def writes_results_of(self, backend: Any) -> bool:
        """Whether the store can write the results of this backend: the same server, database and
        user, and JSON."""
        if self._writes_results[0]() is not backend:
            address = getattr(self.store, "address", None)
            can_write = address is not None and stored_meta.address_of(backend) == address
            self._writes_results = (weakref.ref(backend), can_write)
        return self._writes_results[1]

    def _finish_late(
        self,
        header: LockHeader,
        task_name: str,
        finish: Finish,
        acks_late: bool = False,
    ) -> None:
        settle_later = acks_late or header.leaves_mark
        try:
            finished = self.store.finish(header.key, replace(finish, settle_later=settle_later))
        except StoreUnavailable:
            finish.again = True
            raise
        settle = partial(self.store.settle, header.key, finish, header.leaves_mark)
        if finished.settle and acks_late:
            # Whether the message is acknowledged is not known here: if it is not, its redelivery
            # must still find the record.
            self._settle_later(header, task_name, settle, SETTLE_ANYWAY_S)
        elif finished.settle:
            settle()  # by now the result is stored and the message acknowledged
        self._report_finished(header, task_name, finish, finished)

    def end_for_another(
        self, header: LockHeader, task_name: str, *, rejected: bool = False
    ) -> bool:
        """Release the lock of a body that ended in a process which could not, and is gone.
        How it ended is not known here: as failed, so that it blocks no call."""
        task = self._entry(header)
        if task is None:
            return False
        finish = self._finish(header, State.DISCARDED, False, rejected)
        mine = task.running and task.delivery == header.delivery
        if not header.token and task.running and not mine:
            self._outlive_the_dead(header, task_name, finish)
            return False
        if mine or (not header.token and task.unstarted):
            self._finish_late(header, task_name, replace(finish, again=True))
            return True
        return False

    def settle(
        self, header: LockHeader, task_name: str, state: State, *, rejected: bool = False
    ) -> None:
        """Result and acknowledgement are out: the record of the ended task may go."""
        finish = self._finish(header, state, True, rejected)
        act = partial(self.store.settle, header.key, finish, header.leaves_mark)
        self._run_or_retry("settle", header, task_name, act)
        if header.again and header.token:
            self._settle_later(header, task_name, partial(self._settle_surely, header, finish))

    def unsettled_state(self, header: LockHeader) -> State | None:
        """The final state of the task, if this delivery has ended it and did not settle it yet, and
        no follower waits for its outcome."""
        record, _ = self._run(self._breakers, self.store.read, header.key)
        task = record.tasks.get(header.task_id)
        if task is None or not task.ending or task.delivery != header.delivery:
            return None
        following = record.following
        followed = following is not None and following.groups_of(header.task_id)
        return None if followed or task.expected else task.stored_state

    def _settle_later(
        self, header: LockHeader, task_name: str, act: Callable[[], object], after_s: float = 0.0
    ) -> None:
        what, within_s = f"settle of {task_name}[{header.task_id}]", self.leases.queue_ms / 1000
        self.retry_queue.retry(header.key, what, act, within_s, after_s=after_s, is_check=True)

    def _settle_surely(self, header: LockHeader, finish: Finish) -> None:
        """The message may come back, so its end must leave a mark. The store may have been
        unavailable when the body ended, such as where it is the broker, too: then the process that
        ran it records that later, and the settle of a task that runs has no effect."""
        task = self._entry(header)
        if task is None or task.delivery != header.delivery:
            return
        finished = self.store.finish(header.key, finish)
        if finished.called:
            publish_called(state_of(self.app), header.key, finished.called)
        if finished.verdict == "ended" and not finished.followers:
            self.store.settle(header.key, finish, header.leaves_mark)

    def forget(self, header: LockHeader, task_name: str) -> None:
        """A marked message was reached and dropped: its mark is not needed any more."""
        try:
            self.store.forget(header.key, header.task_id)
        except StoreUnavailable as error:
            reporting.store_error(self.app, "forget", error, task_name, header.task_id, header.key)

    def _run_or_retry(
        self, name: str, header: LockHeader, task_name: str, act: Callable[[], object]
    ) -> None:
        try:
            self._breakers.of(header.key).run(act)
        except StoreUnavailable as error:
            self._retry_later(name, error, header, task_name, act)

    def _retry_later(
        self,
        name: str,
        error: StoreUnavailable,
        header: LockHeader,
        task_name: str,
        act: Callable[[], object],
    ) -> None:
        reporting.store_error(self.app, name, error, task_name, header.task_id, header.key)
        if isinstance(error, UnreadableRecord):
            return  # nothing of this key can be changed before an operator has deleted it

        def run_and_wait() -> None:
            act()
            # Fire-and-forget, it is certain once the store has applied it.
            if hasattr(self.store, "shard_of"):
                self.store.read(header.key)  # behind it, and behind nothing of another shard
            else:
                self.store.flush()
            # The store replies again: further releases need not wait until the circuit closes.
            self._breakers.of(header.key).count(None)

        what = f"{name} of {task_name}[{header.task_id}]"
        self.retry_queue.retry(header.key, what, run_and_wait, self.leases.queue_ms / 1000)

    def _finish(
        self, header: LockHeader, state: State, settle_later: bool, rejected: bool
    ) -> Finish:
        # Every guarded task leaves a mark: without a sign of a second message not for so long.
        unsuspected = header.guard and not header.again
        return Finish(
            task_id=header.task_id,
            delivery=header.delivery,
            state=state,
            retention_ms=self.leases.retention_ms,
            mark_ms=self.leases.restore_ms if unsuspected else self.leases.queue_ms,
            settle_later=settle_later or header.guard or header.again,
            run_lease_ms=self.leases.run_ms,
            token=header.token,
            rejected=rejected,
            merge=header.merge,
        )

    def _report_finished(
        self, header: LockHeader, task_name: str, finish: Finish, finished: Finished
    ) -> None:
        if finished.verdict == "not_yours":
            self._lost(header, task_name, "its lock had lapsed or gone to another when it ended")
            if not header.token:
                self._outlive_the_dead(header, task_name, finish)
            return
        if _is_observed(reporting.released):
            reporting.released(
                task_name, header.task_id, app=self.app, key=header.key, reason=str(finish.state)
            )
        if finished.duplicates:
            self.events.send(header, task_name, finished.duplicates)
        if finished.called:
            publish_called(state_of(self.app), header.key, finished.called)

    def _outlive_the_dead(self, header: LockHeader, task_name: str, finish: Finish) -> None:
        """It ran without passing the gate, and the lock is that of a delivery that may be dead:
        such as the one that sent it as its retry, while the store was unavailable.

        No message of this task is left, so the key would not be released. Once that lease
        has had the time to lapse, it is taken over, and ended. A living one is left as it is.
        """

        def act() -> None:
            if self._entry(header) is None:
                return
            start = self._start(header, task_name, acks_late=False)
            if self.store.start(header.key, start).verdict == "run":
                self._finish_late(header, task_name, replace(finish, again=True))

        lease_s = self.leases.run_ms / 1000
        what = f"end of {task_name}[{header.task_id}], which ran without the store"
        self.retry_queue.retry(
            header.key, what, act, self.leases.queue_ms / 1000, after_s=1.1 * lease_s
        )


def _is_observed(event: reporting.Event) -> bool:
    """Whether the event of every task is logged, or has receivers."""
    signal = event.signal
    return logger.isEnabledFor(event.level) or (signal is not None and bool(signal.receivers))


def _none() -> None:
    return None


def _to_follow(header: LockHeader, task_name: str, message: str) -> Claim:
    return Claim(
        header.task_id,
        task_name,
        states="",
        grace_ms=0,
        keep=header.keep,
        keep_ms=header.window_ms,
        arguments=header.arguments,
        join=message,
        created_at=header.created_at,
    )
