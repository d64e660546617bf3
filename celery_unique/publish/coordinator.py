"""The order of things around one lock: take it, publish, confirm, give it back.

The coordinator knows policies, stores and signals and nothing of messages: how
a message is sent is handed in as a function. What must come before what is the
subject of this module, and each order that matters is named where it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import Leases
from celery_unique.config.settings import UniqueSettings
from celery_unique.exceptions import IdempotencyKeyConflict, StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores.base import Acquired, Held, Holder, LockStore, holder_of
from celery_unique.stores.record import State, letters, terminal_letters

from . import conflicts
from .overlapped_acquire import NotAdmitted, NotAnswered
from .request import (
    Attempt,
    Begin,
    PublishOutcome,
    Send,
    SendWhen,
    changed_delay,
    claim_of,
    window_ms,
)
from .results import CallOutcome
from .store_client import Asking, Remembered

#: How long a duplicate of an unconfirmed holder waits before it looks again.
LOOK_AGAIN_AFTER_S = (0.002, 0.005, 0.010, 0.020, 0.050)
#: How often a call asks anew when the holder it was told of has vanished.
ROUNDS = 5
#: A holder that has waited this long may have lost its message to a purge.
LONG_WAIT_MS = 3_600_000


class UniqueTaskCoordinator(Asking):
    """Everything this library does with one lock store for callers."""

    def __init__(
        self, app: Any, settings: UniqueSettings, store: LockStore, leases: Leases
    ) -> None:
        super().__init__(app, store)
        self.settings = settings
        self.leases = leases
        #: Keys that were taken when they were last asked for, and probably still are: a message
        #: that is made for nothing costs more than waiting for the answer.
        self._taken_lately: Remembered[None] = Remembered()
        #: Where a send_task of the user's own makes them, nothing waits for the store's answer.
        self._celery_makes_messages = True

    @classmethod
    def of(cls, app_state: AppState) -> UniqueTaskCoordinator:
        return cls(app_state.app, app_state.settings, app_state.store, app_state.leases)

    def flush(self) -> None:
        """Nothing waits here: what is told one way is the store's."""

    @cached_property
    def _fingerprint(self) -> str:
        return self.store.fingerprint()

    # -- the caller ----------------------------------------------------------

    def publish(
        self, attempt: Attempt, send: Send, send_when: SendWhen | None = None
    ) -> PublishOutcome:
        """Take the lock and publish, or tell the call who holds it.

        With ``send_when`` the message is made while the store decides, if the store can do that.
        """
        begin: Begin | None = getattr(self.store, "begin_acquire", None)
        if attempt.key in self._taken_lately or not self._celery_makes_messages:
            begin = None
        for _ in range(ROUNDS):
            began = time.monotonic()
            try:
                if send_when is not None and begin is not None:
                    made = self._publish_when_admitted(attempt, begin, send_when, began)
                else:
                    made = self.acquire(attempt)
            except NotAnswered as silence:
                return self.without_store(attempt, send, silence.error)
            if isinstance(made, PublishOutcome):
                return made
            if made.outcome == "created":
                return self.publish_created(attempt, made, send, began)
            settled = self.settle_conflict(attempt, made, send)
            if settled is not None:
                return settled
        # The holders vanished as fast as they came, or one in a canvas, of which no copy may be
        # published, stays unconfirmed: publish rather than lose the call.
        return self._publish_unlocked(attempt, send, "its holder vanished or is not published yet")

    def _publish_when_admitted(
        self, attempt: Attempt, begin: Begin, send_when: SendWhen, began: float
    ) -> PublishOutcome | Acquired:
        """Have the message made, and sent if the store answers that the lock is taken."""
        answer = self.ask(attempt, begin)

        def admit() -> LockHeader:
            acquired = answer.heard()
            if acquired.outcome != "created":
                raise NotAdmitted
            return self._admitted(attempt, acquired, began)

        try:
            result = send_when(attempt.task_id, admit)
        except NotAdmitted:
            return answer.heard()
        except NotAnswered:
            raise
        except BaseException:
            self.withdraw_asked(attempt, answer)
            raise
        if not answer.was_awaited:
            # Somebody's own way to make messages: this one is out, and nobody would give its
            # lock back, since it has no header. The next one gets it before it is made.
            self._celery_makes_messages = False
            self.withdraw_asked(attempt, answer)
            reporting.unlocked(
                attempt.task_name, attempt.task_id, "its message is not Celery's own"
            )
            return PublishOutcome(
                attempt.task_id, CallOutcome("bypassed", False, attempt.key), result
            )
        acquired = answer.heard()
        if acquired.outcome != "created":  # what would have said so did not get through
            return acquired
        return self._published(attempt, acquired, result, self.confirm)

    def header(
        self, attempt: Attempt, task_id: str, created_at: int = 0, outcome: str = "created"
    ) -> LockHeader:
        """What the message tells a worker of the lock."""
        return LockHeader(
            task_id=task_id,
            key=attempt.key,
            namespace=self.settings.namespace,
            store=self._fingerprint,
            created_at=created_at,
            window_ms=attempt.keep_ms or window_ms(attempt.policy),
            keep=terminal_letters(letters(attempt.policy.states)),
            arguments=attempt.arguments,
            outcome="" if outcome == "created" else outcome,
        )

    def publish_created(
        self,
        attempt: Attempt,
        acquired: Acquired,
        send: Send,
        began: float,
        confirm: Callable[[Attempt, str], None] | None = None,
    ) -> PublishOutcome:
        """The lock was taken at ``began``: send the message, or give the lock back."""
        try:
            header = self._admitted(attempt, acquired, began)
            result = send(attempt.task_id, header, changed_delay(attempt, acquired))
        except BaseException:
            self.give_back(attempt)
            raise
        return self._published(attempt, acquired, result, confirm or self.confirm)

    def _admitted(self, attempt: Attempt, acquired: Acquired, began: float) -> LockHeader:
        """The header of the message that may now be sent."""
        if (time.monotonic() - began) * 1000 > attempt.grace_ms / 2:
            # So slow that the grace could end before the message is out.
            self.store.acquire(attempt.key, replace(claim_of(attempt), again=True))
        outcome = self._facts(attempt, acquired).outcome
        return self.header(attempt, attempt.task_id, acquired.now, outcome)

    def _facts(self, attempt: Attempt, acquired: Acquired) -> CallOutcome:
        on_conflict, parent = attempt.policy.on_conflict, attempt.parent_id
        return conflicts.admitted(attempt.key, acquired, on_conflict, parent)

    def _published(
        self,
        attempt: Attempt,
        acquired: Acquired,
        result: Any,
        confirm: Callable[[Attempt, str], None],
    ) -> PublishOutcome:
        confirm(attempt, attempt.task_id)
        self._taken_lately.pop(attempt.key, None)
        facts = self._facts(attempt, acquired)
        reporting.acquired(self.app, attempt.task_name, attempt.task_id, attempt.key, facts.outcome)
        for task_id in acquired.replaced:
            reporting.superseded(self.app, attempt.task_name, task_id, attempt.key, attempt.task_id)
        # The others get this task's outcome.
        ended = tuple(i for i in acquired.replaced if i not in acquired.followers)
        return PublishOutcome(attempt.task_id, facts, result, ended)

    def without_store(
        self, attempt: Attempt, send: Send, error: StoreUnavailable
    ) -> PublishOutcome:
        """No answer. The lock may have been taken all the same, so what follows is told to
        the store in the background: the caller has waited long enough."""
        if self.settings.on_store_error == "publish" or attempt.continues:
            published = self._publish_unlocked(attempt, send, "the lock store did not answer")
            # Not given back: the mark of that would drop the very task that is published.
            self.tell_later(
                error,
                f"confirm that {attempt.task_name}[{attempt.task_id}] is published",
                lambda: self.store.confirm(attempt.key, attempt.task_id, attempt.lease_ms),
                attempt,
            )
            return published
        self.give_back_later(attempt, error)
        raise error

    def _publish_unlocked(self, attempt: Attempt, send: Send, why: str) -> PublishOutcome:
        """Publish although the lock is not certain, or surely not there."""
        self._say_unlocked(attempt, why)
        header = self.header(attempt, attempt.task_id, 0, "bypassed")
        result = send(attempt.task_id, header, None)
        self.remember(attempt.task_id, attempt.key)
        return PublishOutcome(attempt.task_id, CallOutcome("bypassed", False, attempt.key), result)

    def _say_unlocked(self, attempt: Attempt, why: str) -> None:
        say = reporting.unlocked_run if attempt.eager else reporting.unlocked
        say(attempt.task_name, attempt.task_id, why)

    # -- conflicts -----------------------------------------------------------

    def settle_conflict(
        self, attempt: Attempt, acquired: Acquired, send: Send
    ) -> PublishOutcome | None:
        """The answer to a call whose key is held, or None: ask again."""
        self._taken_lately.remember(attempt.key, None)
        assert acquired.holder is not None
        holder = self._known_here(acquired.holder, acquired.now)
        if holder.arguments != attempt.arguments:
            raise IdempotencyKeyConflict(attempt.task_name, key=attempt.key)
        if acquired.outcome in ("joined", "ended"):
            return self._follow(attempt, acquired, holder)
        if attempt.bypasses(holder.task_id):
            # Somebody waits for this very id, so it may not be answered with another's.
            why = f"task {holder.task_id} holds its key, but somebody waits for this very call"
            self._say_unlocked(attempt, why)
            result = send(attempt.task_id, None, None)
            return PublishOutcome(
                attempt.task_id, CallOutcome("bypassed", False, attempt.key), result
            )
        # A duplicate may only name a task that is really published, or a publish that
        # then fails would take this call with it. A rejection promises nothing.
        if acquired.outcome == "duplicate" or holder.abandoned:
            published = self._surely_published(attempt, holder, acquired.now, send)
            if published is None:
                return None
            holder = published
        self._report_conflict(attempt, holder, acquired.now)
        conflict = conflicts.Conflict(
            attempt.task_name,
            attempt.key,
            holder,
            self.settings.conceal_holder,
            by_idempotency_key=bool(attempt.arguments),
        )
        facts = conflicts.resolve(attempt.policy.on_conflict, conflict)
        return PublishOutcome(holder.task_id, facts)

    def _report_conflict(self, attempt: Attempt, holder: Holder, now: int) -> None:
        waited = 0  # in the queue: one that runs, or waits for its ETA, is where it belongs
        if holder.state is State.AVAILABLE:
            waited = max(0, now - max(holder.created_at, holder.eta))
        reporting.conflict(self.app, attempt.task_name, holder, attempt.key, attempt.policy, waited)
        if waited > LONG_WAIT_MS:
            reporting.long_wait(attempt.task_name, holder, waited)
        if holder.task_id == attempt.task_id:
            reporting.held_by_itself(attempt.task_name, holder)

    def _follow(self, attempt: Attempt, acquired: Acquired, holder: Holder) -> PublishOutcome:
        """The call keeps its own id and gets the holder's outcome.

        A pending holder needs no help here, other than for a plain duplicate: the call's
        whole message is in the store. If the holder is never published, its grace lapses or
        it is given back, and the first of its followers is published in its place.
        """
        self._report_conflict(attempt, holder, acquired.now)
        reporting.joined(attempt.task_name, attempt.task_id, holder)
        facts = conflicts.joined(attempt.key, holder)
        ended = acquired.outcome == "ended"
        return PublishOutcome(attempt.task_id, facts, follows=holder.task_id, ended=ended)

    def _known_here(self, holder: Holder, now: int) -> Holder:
        """The holder as this process knows it: the store may not have heard of its own publish."""
        if holder.state is State.PENDING and holder.task_id in self._published_here:
            return _published(holder, now)
        return holder

    def _surely_published(
        self, attempt: Attempt, holder: Holder, now: int, send: Send
    ) -> Holder | None:
        """The holder as it is once its message is surely out, or None: ask again."""
        if holder.abandoned and (attempt.own_life or attempt.eager):
            return holder  # it has no message that could stand for the holder's
        if holder.state is not State.PENDING and not holder.abandoned:
            return holder
        try:
            if holder.abandoned:
                return self._publish_again(attempt, holder, now, send)
            return self._wait_or_help(attempt, holder, now, send)
        except StoreUnavailable as error:
            self.say_store_error("help", error, attempt)
            return holder if holder.abandoned else None

    def _publish_again(
        self, attempt: Attempt, holder: Holder, now: int, send: Send
    ) -> Holder | None:
        """The worker that had the holder's message is dead. The broker may deliver it again
        much later, so the own message goes out under the holder's id: one of the two runs."""
        verdict = self.store.help(attempt.key, holder.task_id, attempt.grace_ms)
        if verdict == "go":
            reporting.published_again(attempt.task_name, holder.task_id)
            published = Held(attempt.key, holder.task_id, "", attempt.lease_ms, returned=True)
            header = self.header(attempt, holder.task_id)
            try:
                send(holder.task_id, header, max(0, holder.eta - now) if holder.eta else 0)
            except BaseException:
                # Nothing went out: the next call is to try it at once.
                self._say_held(attempt, replace(published, lease_ms=0, held_ms=1))
                raise
            self._say_held(attempt, published)
        return None if verdict == "again" else holder

    def _say_held(self, attempt: Attempt, held: Held) -> None:
        try:
            self.store.renew([held])
        except StoreUnavailable as error:  # it counts as dead once the grace is over
            self.say_store_error("help", error, attempt)

    def _wait_or_help(
        self, attempt: Attempt, holder: Holder, now: int, send: Send
    ) -> Holder | None:
        for pause in LOOK_AGAIN_AFTER_S:
            time.sleep(pause)
            record, now = self.store.read(attempt.key)
            task = record.tasks.get(holder.task_id)
            if task is None:
                return None
            if task.state != "p":
                return holder_of(holder.task_id, task, now)
        verdict = self.store.help(attempt.key, holder.task_id)
        if verdict == "go":
            # The own message under the holder's id: the gate and the done mark make a
            # second copy harmless, while taking over would revoke a slow first caller.
            send(holder.task_id, self.header(attempt, holder.task_id), None)
            self.confirm(attempt, holder.task_id)
        return None if verdict == "again" else _published(holder, now)


def _published(holder: Holder, now: int) -> Holder:
    """A pending holder, shown as what it is now that its message is out."""
    waits = State.SCHEDULED if holder.eta > now else State.AVAILABLE
    return replace(holder, state=waits)
