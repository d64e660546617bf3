"""What a worker does with the locks of the messages it holds."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.header import LockHeader
from celery_unique.stores.base import Claim, Finish, Finished, Held, LockStore, Start, Started
from celery_unique.stores.circuit_breaker import Breakers, StoreSkipped
from celery_unique.stores.record import State
from celery_unique.stores.retry_queue import RetryQueue

from .deliveries import UnreportedEnds
from .monitor_events import DuplicateEvents

REMEMBERED = 10_000


class WorkerLockClient:
    """The worker's acts, each of which compares and sets on (task id, delivery)."""

    def __init__(self, app: Any, store: LockStore, gate_store: LockStore, leases: Leases) -> None:
        self.app = app
        self.store = store
        self._gate_store = gate_store
        self._gate_breakers = Breakers(gate_store)
        self._breakers = Breakers(store)
        self.leases = leases
        self.later = RetryQueue(store)
        self.ends = UnreportedEnds()
        self.events = DuplicateEvents(app)
        self._renewal_failed_at = -math.inf
        #: Fingerprints other than this store's that callers have sent, each judged once.
        self._judged_stores: set[str] = set()
        #: Deliveries whose body has ended in this process: not to be renewed any more,
        #: even where Celery forgets to forget the request.
        self._ended: OrderedDict[str, None] = OrderedDict()
        #: Deliveries let through the gate that no process or thread of the pool has taken.
        self._on_the_way: OrderedDict[str, tuple[LockHeader, str]] = OrderedDict()
        #: Deliveries that have ended, with messages that the event loop has yet to acknowledge.
        self._unacknowledged: OrderedDict[str, Held] = OrderedDict()

    @classmethod
    def of(cls, app_state: AppState) -> WorkerLockClient:
        return cls(app_state.app, app_state.store, app_state.gate_store, app_state.leases)

    def flush(self) -> None:
        self.events.flush()

    @property
    def failed_at(self) -> float:
        """When the store last did not answer this process."""
        breakers = (self._gate_breakers, self._breakers)
        return max(self._renewal_failed_at, *(each.failed_at for each in breakers))

    def renewal_failed(self) -> None:
        self._renewal_failed_at = time.monotonic()

    def ended_here(self, delivery: str) -> None:
        self._ended[delivery] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended_here(self, delivery: str) -> bool:
        return delivery in self._ended

    def sent_to_pool(self, header: LockHeader, task_name: str) -> None:
        self._on_the_way[header.delivery] = (header, task_name)
        while len(self._on_the_way) > REMEMBERED:  # Celery drops some when it reconnects
            self._on_the_way.popitem(last=False)

    def taken_by_pool(self, header: LockHeader, task_name: str) -> None:
        self._on_the_way.pop(header.delivery, None)
        self.ends.began(header, task_name)

    def on_the_way(self) -> list[Held]:
        """What the gate let through and the pool has not taken, as far as the worker knows. Of
        a worker that stops: a child may have taken it, unheard, and its message goes back to
        the queue although it runs."""
        run_ms = self.leases.run_ms
        return [
            Held(header.key, header.task_id, delivery, run_ms, run_ms, copies=True)
            for delivery, (header, _) in list(self._on_the_way.items())
        ]

    def waits_for_acknowledgement(self, header: LockHeader) -> None:
        """Until it is settled, a second delivery of the message must find the first alive."""
        queue_ms, run_ms = self.leases.queue_ms, self.leases.run_ms
        held = Held(header.key, header.task_id, header.delivery, queue_ms, run_ms)
        self._unacknowledged[header.delivery] = held
        while len(self._unacknowledged) > REMEMBERED:
            self._unacknowledged.popitem(last=False)

    def unacknowledged(self) -> list[Held]:
        return list(self._unacknowledged.values())

    def pool_is_gone(self) -> None:
        """The worker stops. What its pool has not come to goes back to the queue, and
        must not wait there for the lease of a delivery that never ran."""
        while self._on_the_way:
            _, (header, task_name) = self._on_the_way.popitem()
            self.retried(header, task_name, 0, copies=True)

    def start(self, header: LockHeader, task_name: str, delivery: str, acks_late: bool) -> Started:
        """Ask the gate. Raises StoreUnavailable: then the task runs, since it was admitted."""
        start = self._start(header, task_name, delivery, acks_late)
        started = self._gate_breakers.of(header.key).run(
            lambda: self._gate_store.start(header.key, start)
        )
        self._compare_stores(header, task_name, found=not started.lost)
        if started.verdict == "run":
            reporting.started(task_name, header.task_id, key=header.key)
        if started.lost:
            self.lost(header, task_name, "its lock had lapsed before it started")
        return started

    def follow(self, header: LockHeader, task_name: str, message: str, holder_id: str) -> bool:
        """Make a superseded task, whose whole message this is, a follower of its replacement.
        False: it is a task of the key again, which the gate must be asked about.

        Raises StoreUnavailable: then the message must not be acknowledged.
        """
        claim = _to_follow(header, task_name, message)
        return self._gate_breakers.of(header.key).run(
            lambda: self._gate_store.follow(header.key, claim, holder_id)
        )

    def follow_again(
        self, header: LockHeader, task_name: str, message: str, holder_id: str
    ) -> bool:
        """Attach a follower that the store has lost. False: it is a task of its key."""
        claim = _to_follow(header, task_name, message)
        return self.store.follow(header.key, claim, holder_id)

    def _compare_stores(self, header: LockHeader, task_name: str, *, found: bool) -> None:
        """A caller with another store or namespace takes locks that this worker never sees.

        A fingerprint is made of an address, and one store may have several. The caller's lock,
        found here under its key and id, proves that its store is this one.
        """
        if header.store in ("", self.store.fingerprint()) or header.store in self._judged_stores:
            return
        self._judged_stores.add(header.store)
        if not found:
            reporting.other_store(task_name, header.task_id)

    def catch_up(self, header: LockHeader, task_name: str, acks_late: bool) -> bool:
        """Tell the store of a task that started while it was away. Whether it has its lock.

        Until then its key is held as that of a waiting task: for very long, if its worker dies.
        """
        breaker = self._breakers.of(header.key)
        record, _ = breaker.run(lambda: self.store.read(header.key))
        task = record.tasks.get(header.task_id)
        if task is None or task.terminal:
            return False  # it has ended meanwhile, or else its end will tell that it lapsed
        start = self._start(header, task_name, header.delivery, acks_late)
        started = breaker.run(lambda: self.store.start(header.key, start))
        if started.verdict != "run":
            self.lost(
                header, task_name, "it started without the store, and its lock is not its own"
            )
        return started.verdict == "run"

    def _start(self, header: LockHeader, task_name: str, delivery: str, acks_late: bool) -> Start:
        return Start(
            task_id=header.task_id,
            delivery=delivery,
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
        )

    def is_run_by_its_sender(self, header: LockHeader) -> bool:
        """Whether the body that published this message (its retry) has not ended yet."""
        record, now = self._gate_breakers.of(header.key).run(
            lambda: self._gate_store.read(header.key)
        )
        task = record.tasks.get(header.task_id)
        if task is None or task.delivery != header.sent_by:
            return False
        return task.delivery_lease > now and not task.terminal

    def is_still_active(self, header: LockHeader) -> bool:
        """Whether the end of this delivery has not been told, as far as can be seen."""
        try:
            record, _ = self.store.read(header.key)
        except StoreUnavailable:
            return True  # told once more, it does no harm
        task = record.tasks.get(header.task_id)
        return task is not None and task.state == "r" and task.delivery == header.delivery

    def is_taken_over(self, header: LockHeader) -> bool:
        """Whether another delivery runs this task now, since our lease lapsed."""
        try:
            record, _ = self._gate_breakers.of(header.key).run(
                lambda: self._gate_store.read(header.key)
            )
        except StoreUnavailable as error:
            reporting.store_error(self.app, "read", error, "", header.task_id, header.key)
            return False
        task = record.tasks.get(header.task_id)
        return task is not None and task.state == "r" and task.delivery != header.delivery

    def retried(self, header: LockHeader, task_name: str, delay_ms: int, copies: bool) -> None:
        """The task waits for its retry: the lock stays, the delivery lets go of it."""
        self.ends.goes_on(header.delivery)
        lease_ms = self.leases.queue_ms + delay_ms

        def act() -> None:
            self.store.retry(header.key, header.task_id, header.delivery, lease_ms, copies)

        try:
            self._breakers.of(header.key).run(act)
        except StoreUnavailable as error:
            self._retry_later("retry", error, header, task_name, act)

    def finish(
        self,
        header: LockHeader,
        task_name: str,
        state: State,
        *,
        settle_later: bool = False,
        backstop: bool = False,
        rejected: bool = False,
    ) -> Finished:
        """The body is over: give the key back, now or as soon as the store answers.

        A backstop says it a second time, perhaps: it is no news if nothing is left. A message
        that is rejected may come back from a dead letter exchange: then it runs.
        """
        finish = self._finish(header, state, settle_later, rejected)
        try:
            finished = self._breakers.of(header.key).run(
                lambda: self.store.finish(header.key, finish)
            )
        except StoreUnavailable as error:
            # A time-out may have finished it: then there is nothing left, which is no news.
            silent = backstop or not isinstance(error, StoreSkipped)
            self._retry_later(
                "finish",
                error,
                header,
                task_name,
                lambda: self._finish_late(header, task_name, finish, silent),
            )
            return Finished("ended", False)
        if finished.verdict == "ended" or not backstop:
            self._say_finished(header, task_name, finish, finished)
        return finished

    def _finish_late(
        self, header: LockHeader, task_name: str, finish: Finish, silent: bool
    ) -> None:
        # By now the result is stored and the message acknowledged: settle at once.
        finished = self.store.finish(header.key, replace(finish, settle_later=header.again))
        if finished.settle:
            self.store.settle(header.key, finish, header.again)
        if finished.verdict == "not_yours" and silent and not self._has_record(header):
            finished = replace(finished, verdict="ended")
        self._say_finished(header, task_name, finish, finished)

    def end_for_another(
        self, header: LockHeader, task_name: str, *, rejected: bool = False
    ) -> bool:
        """Give back the lock of a body that ended in a process which could not, and is gone.
        How it ended is not known here: as failed, so that it blocks nobody."""
        record, _ = self.store.read(header.key)
        task = record.tasks.get(header.task_id)
        if task is None:
            return False
        finish = self._finish(header, State.DISCARDED, False, rejected)
        mine = task.state == "r" and task.delivery == header.delivery
        if not header.token and task.state == "r" and not mine:
            self._outlive_the_dead(header, task_name, finish)
            return False
        if mine or (not header.token and task.state in "pw"):
            self._finish_late(header, task_name, finish, silent=True)
            return True
        return False

    def _has_record(self, header: LockHeader) -> bool:
        record, _ = self.store.read(header.key)
        return header.task_id in record.tasks

    def settle(
        self, header: LockHeader, task_name: str, state: State, *, rejected: bool = False
    ) -> None:
        """Result and acknowledgement are out: the record of the ended task may go."""
        self._unacknowledged.pop(header.delivery, None)
        finish = self._finish(header, state, True, rejected)

        def act() -> None:
            self.store.settle(header.key, finish, header.again)

        try:
            self._breakers.of(header.key).run(act)
        except StoreUnavailable as error:
            self._retry_later("settle", error, header, task_name, act)

    def _retry_later(
        self,
        name: str,
        error: StoreUnavailable,
        header: LockHeader,
        task_name: str,
        act: Callable[[], None],
    ) -> None:
        reporting.store_error(self.app, name, error, task_name, header.task_id, header.key)
        if isinstance(error, UnreadableRecord):
            return  # nothing of this key can be changed before an operator has deleted it

        def carry_out() -> None:
            act()
            # Told one way, it is told once the store has carried it out.
            if hasattr(self.store, "shard_of"):
                self.store.read(header.key)  # behind it, and behind nothing of another shard
            else:
                self.store.flush()

        self.later.retry(
            header.key,
            f"{name} of {task_name}[{header.task_id}]",
            carry_out,
            self.leases.queue_ms / 1000,
        )

    def dropped(self, header: LockHeader, task_name: str) -> None:
        """A marked message was reached and dropped: its mark has done its work."""
        try:
            self.store.forget(header.key, header.task_id)
        except StoreUnavailable as error:
            reporting.store_error(self.app, "forget", error, task_name, header.task_id, header.key)

    def _finish(
        self, header: LockHeader, state: State, settle_later: bool, rejected: bool = False
    ) -> Finish:
        return Finish(
            task_id=header.task_id,
            delivery=header.delivery,
            state=state,
            retention_ms=self.leases.retention_ms,
            mark_ms=self.leases.queue_ms,
            settle_later=settle_later or header.again,
            run_lease_ms=self.leases.run_ms,
            token=header.token,
            rejected=rejected,
        )

    def _say_finished(
        self, header: LockHeader, task_name: str, finish: Finish, finished: Finished
    ) -> None:
        if finished.verdict == "not_yours":
            self.lost(header, task_name, "its lock had lapsed or gone to another when it ended")
            if not header.token:
                self._outlive_the_dead(header, task_name, finish)
            return
        reporting.released(
            task_name, header.task_id, app=self.app, key=header.key, reason=str(finish.state)
        )
        self.events.tell(header, task_name, finished.duplicates)

    def _outlive_the_dead(self, header: LockHeader, task_name: str, finish: Finish) -> None:
        """It ran without asking the gate, and the lock is a delivery's that may be dead: such
        as the one that sent it as its retry, which the store was not there to hear of.

        Nobody will run this task again, so nobody would give the key back. Once that lease
        has had the time to lapse, it is taken over, and ended. A living one is left alone.
        """

        def act() -> None:
            if not self._has_record(header):
                return
            start = self._start(header, task_name, header.delivery, acks_late=False)
            if self.store.start(header.key, start).verdict == "run":
                self._finish_late(header, task_name, finish, silent=True)

        lease_s = self.leases.run_ms / 1000
        what = f"end of {task_name}[{header.task_id}], which ran without the store"
        self.later.retry(header.key, what, act, self.leases.queue_ms / 1000, after_s=1.1 * lease_s)

    def lost(self, header: LockHeader, task_name: str, reason: str) -> None:
        reporting.lost(task_name, header.task_id, app=self.app, key=header.key, reason=reason)


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
    )
