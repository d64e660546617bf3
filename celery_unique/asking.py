"""What a caller asks the store for: a lock, or many together.

And what is done where no answer is heard: the locks may have been taken all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from .answers import Answer, NotAnswered
from .attempts import Attempt, Begin, BeginMany, claim_of, confirmed_of
from .breaker import Breaker, Breakers, Reply
from .exceptions import StoreUnavailable
from .stores.base import Acquired, LockStore
from .telling import Telling

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
