"""What a caller tells the store once it has asked for a lock: at once, or as soon as it answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from . import reports
from .attempts import Attempt, confirmed_of
from .breaker import StoreSkipped
from .exceptions import StoreUnavailable, UnreadableRecord
from .later import Later
from .stores.base import Acquired, LockStore

#: How many ids published by this process are remembered: their confirmations may
#: still be on the way, and a sequence of calls must not wait for its own.
REMEMBERED = 512

Kept = TypeVar("Kept")


class Remembered(OrderedDict[str, Kept]):
    """The newest entries, as many as are worth it."""

    def remember(self, name: str, value: Kept) -> None:
        self[name] = value
        while len(self) > REMEMBERED:
            try:
                self.popitem(last=False)
            except KeyError:  # another thread was faster
                return


class Telling:
    """Confirming, and giving back."""

    def __init__(self, app: Any, store: LockStore) -> None:
        self.app = app
        self.store = store
        self.later = Later(store)
        self._published_here: Remembered[str] = Remembered()  # id -> key

    def confirm(self, attempt: Attempt, task_id: str) -> None:
        # After the publish, never before: a confirmed lock without a message would
        # swallow calls for a whole queue lease.
        self.remember(task_id, attempt.key)

        def act() -> None:
            self.store.confirm(attempt.key, task_id, attempt.lease_ms)

        try:
            act()
        except StoreUnavailable as error:
            self.say_store_error("confirm", error, attempt)
            # Unconfirmed, it lapses with its grace, and what it replaced would run after all.
            self.later.retry(
                attempt.key,
                f"confirm that {attempt.task_name}[{task_id}] is published",
                act,
                attempt.grace_ms / 1000,
            )

    def confirm_many(self, attempts: list[Attempt]) -> None:
        """As for one of them: after their messages are sent."""
        if not attempts:
            return

        def act() -> None:
            self.store.confirm_many(confirmed_of(attempts))

        try:
            act()
        except StoreUnavailable as error:
            self.say_store_error("confirm", error, attempts[0])
            grace_s = min(attempt.grace_ms for attempt in attempts) / 1000
            what = f"confirm that {len(attempts)} tasks are published"
            self.later.retry(attempts[0].key, what, act, grace_s)

    def key_of_published(self, task_id: str) -> str | None:
        return self._published_here.get(task_id)

    def remember(self, task_id: str, key: str) -> None:
        self._published_here.remember(task_id, key)

    def give_back(self, attempt: Attempt) -> None:
        """Publishing failed: the key is free again, now or as soon as the store answers."""

        def act() -> object:
            return self.store.give_back(attempt.key, attempt.task_id, self._mark_ms(attempt))

        try:
            act()
        except StoreUnavailable as error:
            self.say_store_error("give_back", error, attempt)
            self.later.retry(
                attempt.key,
                f"give back the lock of {attempt.task_name}[{attempt.task_id}]",
                act,
                attempt.grace_ms / 1000,
            )

    def _mark_ms(self, attempt: Attempt) -> int:
        return attempt.delay_ms + attempt.lease_ms

    def withdraw(self, attempt: Attempt, acquired: Acquired) -> None:
        """The call is not made after all: let go of what it was given."""
        if acquired.outcome == "created":
            self.give_back(attempt)
        elif acquired.outcome == "joined":
            self.store.complete_follower(attempt.key, attempt.task_id)

    def give_back_later(self, attempt: Attempt, error: StoreUnavailable | None = None) -> None:
        """The store's answer was not heard, and the lock may have been taken all the same."""
        self.tell_later(
            error,
            f"give back the lock that {attempt.task_name}[{attempt.task_id}] may have taken",
            lambda: self.store.give_back(attempt.key, attempt.task_id, self._mark_ms(attempt)),
            attempt,
        )

    def tell_later(
        self, error: StoreUnavailable | None, what: str, act: Callable[[], object], attempt: Attempt
    ) -> None:
        def carry_out() -> None:
            act()
            if attempt.join:  # or it was attached to a holder, and would end with that
                self.store.complete_follower(attempt.key, attempt.task_id)

        # Nothing can have happened in a store that was skipped, nor to a record that is none.
        if not isinstance(error, (StoreSkipped, UnreadableRecord)):
            self.later.retry(attempt.key, what, carry_out, attempt.grace_ms / 1000)

    def say_store_error(self, act: str, error: StoreUnavailable, attempt: Attempt) -> None:
        reports.store_error(self.app, act, error, attempt.task_name, attempt.task_id, attempt.key)
