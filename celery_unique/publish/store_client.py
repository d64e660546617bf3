"""What a caller tells the store once it has asked for a lock: at once, or as soon as it answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from celery_unique import reporting
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import Acquired, LockStore
from celery_unique.stores.circuit_breaker import Breaker, Breakers, Reply, StoreSkipped
from celery_unique.stores.retry_queue import RetryQueue

from .overlapped_acquire import Answer, NotAnswered
from .request import Attempt, Begin, BeginMany, claim_of, confirmed_of

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
        self.later = RetryQueue(store)
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
        reporting.store_error(self.app, act, error, attempt.task_name, attempt.task_id, attempt.key)


Answers = list[Acquired | StoreUnavailable]


class Asking(Telling):
    """Asking for locks."""

    def __init__(self, app: Any, store: LockStore) -> None:
        super().__init__(app, store)
        self._breakers = Breakers(store)

    def acquire(self, attempt: Attempt) -> Acquired:
        """Raises NotAnswered, as ``ask`` does, where the store does not."""
        claim = claim_of(attempt)
        return self._answer(
            attempt,
            self._breakers.of(attempt.key).run,
            lambda: self.store.acquire(attempt.key, claim),
        )

    def ask(self, attempt: Attempt, begin: Begin) -> Answer:
        """As ``acquire``, with a store that decides while the caller does something else."""
        claim = claim_of(attempt)
        breaker = self._breakers.of(attempt.key)
        wait = self._answer(attempt, breaker.ask, lambda: begin(attempt.key, claim))
        return Answer(lambda: self._answer(attempt, breaker.hear, wait))

    def withdraw_asked(self, attempt: Attempt, answer: Answer) -> None:
        """The call is not made after all: let go of what it may have been given."""
        try:
            self.withdraw(attempt, answer.heard())
        except (StoreUnavailable, NotAnswered):
            self.give_back_later(attempt)
        except BaseException:
            if answer.acquired is not None:
                raise
            # It was interrupted, which is why we are here, and is given back for that already.

    def ask_many(
        self, attempts: list[Attempt], published: list[Attempt]
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        """Ask for many locks together; what becomes of each is as if it was asked for alone.

        What is returned waits for that, once, or raises that the store does not answer; where it
        did so for some, the others have the error in their place. A store that can do so decides
        meanwhile. It is told of others, ``published``, on the way.
        """
        begin: BeginMany | None = getattr(self.store, "begin_acquire_many", None)
        if not attempts:
            self.confirm_many(published)
            return list
        # Parts of the store that are skipped keep the others from nothing.
        skipped, asked = self._skipped(attempts)
        claims = [(attempt.key, claim_of(attempt)) for attempt in asked]

        def with_skipped(answers: Answers) -> Answers:
            answered = iter(answers)
            return [skipped.get(attempt.task_id) or next(answered) for attempt in attempts]

        if not asked:
            self.confirm_many(published)
            return partial(_raise, next(iter(skipped.values())))
        if begin is None:
            self.confirm_many(published)
            return lambda: with_skipped(self._heard(asked, lambda: self.store.acquire_many(claims)))
        told = confirmed_of(published)
        try:
            wait = self._counted(asked, lambda: begin(claims, told))
        except StoreUnavailable as error:
            self.confirm_many(published)  # as soon as it answers
            return partial(_raise, error)
        return lambda: with_skipped(self._heard(asked, wait))

    def _skipped(
        self, attempts: list[Attempt]
    ) -> tuple[dict[str, StoreUnavailable], list[Attempt]]:
        skipped: dict[str, StoreUnavailable] = {}
        asked = []
        for attempt in attempts:
            error = self._breakers.of(attempt.key).skips()
            if error is None:
                asked.append(attempt)
            else:
                skipped[attempt.task_id] = error
                self.say_store_error("acquire", error, attempt)
        return skipped, asked

    def _heard(self, attempts: list[Attempt], act: Callable[[], Answers]) -> Answers:
        """What the store has answered; an error in place of an answer is counted and reported."""
        answers = self._counted(attempts, act)
        errors: dict[Breaker, StoreUnavailable | None] = {}
        for attempt, answer in zip(attempts, answers, strict=True):
            breaker = self._breakers.of(attempt.key)
            if isinstance(answer, StoreUnavailable):
                errors[breaker] = answer
                self.say_store_error("acquire", answer, attempt)
            else:
                errors.setdefault(breaker, None)
        for breaker, error in errors.items():
            breaker.count(error)
        return answers

    def _counted(self, attempts: list[Attempt], act: Callable[[], Reply]) -> Reply:
        try:
            return self._answers(attempts, lambda act: act(), act)
        except StoreUnavailable as error:
            for breaker in {self._breakers.of(attempt.key) for attempt in attempts}:
                breaker.count(error)
            raise

    def _answer(
        self,
        attempt: Attempt,
        through: Callable[[Callable[[], Reply]], Reply],
        act: Callable[[], Reply],
    ) -> Reply:
        try:
            return self._answers([attempt], through, act)
        except StoreUnavailable as error:
            raise NotAnswered(error) from error

    def _answers(
        self,
        attempts: list[Attempt],
        through: Callable[[Callable[[], Reply]], Reply],
        act: Callable[[], Reply],
    ) -> Reply:
        try:
            return through(act)
        except StoreUnavailable as error:
            self.say_store_error("acquire", error, attempts[0])
            raise
        except BaseException:
            # A time limit of the caller's, for example: nobody has heard the answer, and the
            # locks may have been taken all the same.
            for attempt in attempts:
                self.give_back_later(attempt)
            raise


def _raise(error: Exception) -> NoReturn:
    raise error
