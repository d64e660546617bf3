"""The order of things around one lock: take it, publish, confirm, give it back.

The coordinator knows policies, stores and signals and nothing of messages: how
a message is sent is handed in as a function. What must come before what is the
subject of this module, and each order that matters is named where it is kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from . import conflicts, reports
from .attempts import Attempt, Published, Send, changed_delay, claim_of, window_ms
from .breaker import Breaker, StoreSkipped
from .exceptions import IdempotencyKeyConflict, StoreUnavailable
from .facts import CallFacts
from .header import LockHeader
from .later import Later
from .leases import Leases
from .settings import UniqueSettings
from .stores.base import Acquired, Holder, LockStore
from .stores.record import State, letters, terminal_letters

#: How long a duplicate of an unconfirmed holder waits before it looks again.
LOOK_AGAIN_AFTER_S = (0.002, 0.005, 0.010, 0.020, 0.050)
#: How often a call asks anew when the holder it was told of has vanished.
ROUNDS = 5
#: How many ids published by this process are remembered: their confirmations may
#: still be on the way, and a sequence of calls must not wait for its own.
REMEMBERED = 512
#: A holder that has waited this long may have lost its message to a purge.
LONG_WAIT_MS = 3_600_000


class UniqueTaskCoordinator:
    """Everything this library does with one lock store."""

    def __init__(
        self, app: Any, settings: UniqueSettings, store: LockStore, leases: Leases
    ) -> None:
        self.app = app
        self.settings = settings
        self.store = store
        self.leases = leases
        self.later = Later()
        self._breaker = Breaker()
        self._published_here: OrderedDict[str, str] = OrderedDict()

    @cached_property
    def _fingerprint(self) -> str:
        return self.store.fingerprint()

    # -- the caller ----------------------------------------------------------

    def publish(self, attempt: Attempt, send: Send) -> Published:
        """Take the lock and publish, or tell the call who holds it."""
        for _ in range(ROUNDS):
            began = time.monotonic()
            try:
                acquired = self._acquire(attempt)
            except StoreUnavailable as error:
                return self.without_store(attempt, send, error)
            if acquired.outcome == "created":
                return self.publish_created(attempt, acquired, send, began)
            settled = self.settle_conflict(attempt, acquired, send)
            if settled is not None:
                return settled
        # The holders vanished as fast as they came: publish rather than lose the call.
        return self._publish_unlocked(attempt, send, "its holder kept vanishing")

    def _acquire(self, attempt: Attempt) -> Acquired:
        claim = claim_of(attempt)
        try:
            return self._breaker.run(lambda: self.store.acquire(attempt.key, claim))
        except StoreUnavailable as error:
            self._say_store_error("acquire", error, attempt)
            raise

    def acquire_many(self, attempts: list[Attempt]) -> list[Acquired]:
        """Ask for many locks together; what becomes of each is as if it was asked for alone."""
        claims = [(attempt.key, claim_of(attempt)) for attempt in attempts]
        try:
            return self._breaker.run(lambda: self.store.acquire_many(claims))
        except StoreUnavailable as error:
            self._say_store_error("acquire", error, attempts[0])
            raise

    def withdraw(self, attempt: Attempt, acquired: Acquired) -> None:
        """The call is not made after all: let go of what it was given."""
        if acquired.outcome == "created":
            self.give_back(attempt)
        elif acquired.outcome == "joined":
            self.store.complete_follower(attempt.key, attempt.task_id)

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
    ) -> Published:
        """The lock was taken at ``began``: send the message, or give the lock back."""
        facts = conflicts.admitted(attempt.key, acquired)
        try:
            if (time.monotonic() - began) * 1000 > attempt.grace_ms / 2:
                # So slow that the grace could end before the message is out.
                self.store.acquire(attempt.key, replace(claim_of(attempt), again=True))
            header = self.header(attempt, attempt.task_id, acquired.now, facts.outcome)
            result = send(attempt.task_id, header, changed_delay(attempt, acquired))
        except BaseException:
            self.give_back(attempt)
            raise
        (confirm or self._confirm)(attempt, attempt.task_id)
        reports.acquired(self.app, attempt.task_name, attempt.task_id, attempt.key, facts.outcome)
        for task_id in acquired.replaced:
            reports.superseded(self.app, attempt.task_name, task_id, attempt.key, attempt.task_id)
        return Published(attempt.task_id, facts, result, acquired.replaced)

    def _confirm(self, attempt: Attempt, task_id: str) -> None:
        # After the publish, never before: a confirmed lock without a message would
        # swallow calls for a whole queue lease.
        self.remember(task_id, attempt.key)

        def act() -> None:
            self.store.confirm(attempt.key, task_id, attempt.lease_ms)

        try:
            act()
        except StoreUnavailable as error:
            self._say_store_error("confirm", error, attempt)
            # Unconfirmed, it lapses with its grace, and what it replaced would run after all.
            self.later.retry(
                f"confirm that {attempt.task_name}[{task_id}] is published",
                act,
                attempt.grace_ms / 1000,
            )

    def confirm_many(self, attempts: list[Attempt]) -> None:
        """As for one of them: after their messages are sent."""

        def act() -> None:
            self.store.confirm_many([(a.key, a.task_id, a.lease_ms) for a in attempts])

        try:
            act()
        except StoreUnavailable as error:
            self._say_store_error("confirm", error, attempts[0])
            grace_s = min(attempt.grace_ms for attempt in attempts) / 1000
            self.later.retry(f"confirm that {len(attempts)} tasks are published", act, grace_s)

    def key_of_published(self, task_id: str) -> str | None:
        return self._published_here.get(task_id)

    def remember(self, task_id: str, key: str) -> None:
        self._published_here[task_id] = key
        while len(self._published_here) > REMEMBERED:
            try:
                self._published_here.popitem(last=False)
            except KeyError:  # another thread was faster
                return

    def give_back(self, attempt: Attempt) -> None:
        """Publishing failed: the key is free again, now or as soon as the store answers."""

        def act() -> object:
            return self.store.give_back(attempt.key, attempt.task_id, self._mark_ms(attempt))

        try:
            act()
        except StoreUnavailable as error:
            self._say_store_error("give_back", error, attempt)
            self.later.retry(
                f"give back the lock of {attempt.task_name}[{attempt.task_id}]",
                act,
                attempt.grace_ms / 1000,
            )

    def _mark_ms(self, attempt: Attempt) -> int:
        return attempt.delay_ms + attempt.lease_ms

    def without_store(self, attempt: Attempt, send: Send, error: StoreUnavailable) -> Published:
        """No answer. The lock may have been taken all the same, so what follows is told to
        the store in the background: the caller has waited long enough."""
        if self.settings.on_store_error == "publish" or attempt.continues:
            published = self._publish_unlocked(attempt, send, "the lock store did not answer")
            # Not given back: the mark of that would drop the very task that is published.
            self._tell_later(
                error,
                f"confirm that {attempt.task_name}[{attempt.task_id}] is published",
                lambda: self.store.confirm(attempt.key, attempt.task_id, attempt.lease_ms),
                attempt,
            )
            return published
        self.give_back_later(attempt, error)
        raise error

    def give_back_later(self, attempt: Attempt, error: StoreUnavailable) -> None:
        """The store did not answer, and the lock may have been taken all the same."""
        self._tell_later(
            error,
            f"give back the lock that {attempt.task_name}[{attempt.task_id}] may have taken",
            lambda: self.store.give_back(attempt.key, attempt.task_id, self._mark_ms(attempt)),
            attempt,
        )

    def _tell_later(
        self, error: StoreUnavailable, what: str, act: Callable[[], object], attempt: Attempt
    ) -> None:
        def carry_out() -> None:
            act()
            if attempt.join:  # or it was attached to a holder, and would end with that
                self.store.complete_follower(attempt.key, attempt.task_id)

        if not isinstance(error, StoreSkipped):
            self.later.retry(what, carry_out, attempt.grace_ms / 1000)

    def _publish_unlocked(self, attempt: Attempt, send: Send, why: str) -> Published:
        """Publish although the lock is not certain, or surely not there."""
        reports.unlocked(attempt.task_name, attempt.task_id, why)
        header = self.header(attempt, attempt.task_id, 0, "bypassed")
        result = send(attempt.task_id, header, None)
        self.remember(attempt.task_id, attempt.key)
        return Published(attempt.task_id, CallFacts("bypassed", False, attempt.key), result)

    # -- conflicts -----------------------------------------------------------

    def settle_conflict(self, attempt: Attempt, acquired: Acquired, send: Send) -> Published | None:
        """The answer to a call whose key is held, or None: ask again."""
        holder = acquired.holder
        assert holder is not None
        if holder.arguments != attempt.arguments:
            raise IdempotencyKeyConflict(attempt.task_name, key=attempt.key)
        if acquired.outcome in ("joined", "ended"):
            return self._follow(attempt, acquired, holder)
        if attempt.bypasses:
            # Somebody waits for this very id, so it may not be answered with another's.
            why = f"task {holder.task_id} holds its key, but a canvas or callback needs its id"
            reports.unlocked(attempt.task_name, attempt.task_id, why)
            result = send(attempt.task_id, None, None)
            return Published(attempt.task_id, CallFacts("bypassed", False, attempt.key), result)
        # A duplicate may only name a task that is really published, or a publish that
        # then fails would take this call with it. A rejection promises nothing.
        if acquired.outcome == "duplicate":
            if not self._surely_published(attempt, holder, send):
                return None
            if holder.state is State.PENDING:
                holder = replace(holder, state=State.AVAILABLE)
        self._report_conflict(attempt, holder, acquired.now)
        conflict = conflicts.Conflict(
            attempt.task_name, attempt.key, holder, self.settings.conceal_holder
        )
        facts = conflicts.resolve(attempt.policy.on_conflict, conflict)
        return Published(holder.task_id, facts)

    def _report_conflict(self, attempt: Attempt, holder: Holder, now: int) -> None:
        reports.conflict(self.app, attempt.task_name, holder, attempt.key, attempt.policy)
        if holder.state is State.AVAILABLE and now - holder.created_at > LONG_WAIT_MS:
            reports.long_wait(attempt.task_name, holder, now)

    def _follow(self, attempt: Attempt, acquired: Acquired, holder: Holder) -> Published:
        """The call keeps its own id and gets the holder's outcome.

        A pending holder needs no help here, other than for a plain duplicate: the call's
        whole message is in the store. If the holder is never published, its grace lapses or
        it is given back, and the first of its followers is published in its place.
        """
        self._report_conflict(attempt, holder, acquired.now)
        reports.joined(attempt.task_name, attempt.task_id, holder)
        facts = conflicts.joined(attempt.key, holder)
        ended = acquired.outcome == "ended"
        return Published(attempt.task_id, facts, follows=holder.task_id, ended=ended)

    def _surely_published(self, attempt: Attempt, holder: Holder, send: Send) -> bool:
        if holder.state is not State.PENDING or holder.task_id in self._published_here:
            return True
        try:
            return self._wait_or_help(attempt, holder.task_id, send)
        except StoreUnavailable as error:
            self._say_store_error("help", error, attempt)
            return False

    def _wait_or_help(self, attempt: Attempt, holder_id: str, send: Send) -> bool:
        for pause in LOOK_AGAIN_AFTER_S:
            time.sleep(pause)
            record, _ = self.store.read(attempt.key)
            task = record.tasks.get(holder_id)
            if task is None:
                return False
            if task.state != "p":
                return True
        verdict = self.store.help(attempt.key, holder_id)
        if verdict == "go":
            # The own message under the holder's id: the gate and the done mark make a
            # second copy harmless, while taking over would revoke a slow first caller.
            send(holder_id, self.header(attempt, holder_id), None)
            self._confirm(attempt, holder_id)
        return verdict != "again"

    def _say_store_error(self, act: str, error: StoreUnavailable, attempt: Attempt) -> None:
        reports.store_error(self.app, act, error, attempt.task_name, attempt.task_id, attempt.key)
