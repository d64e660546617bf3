"""What a caller asks the store for: a lock, or many together.

And what is done where no answer is heard: the locks may have been taken all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from .answers import Answer, NotAnswered
from .attempts import Attempt, Begin, BeginMany, claim_of, confirmed_of
from .breaker import Breaker, Reply
from .exceptions import StoreUnavailable
from .stores.base import Acquired, LockStore
from .telling import Telling


class Asking(Telling):
    """Asking for locks."""

    def __init__(self, app: Any, store: LockStore) -> None:
        super().__init__(app, store)
        self._breaker = Breaker()

    def acquire(self, attempt: Attempt) -> Acquired:
        """Raises NotAnswered, as ``ask`` does, where the store does not."""
        claim = claim_of(attempt)
        return self._answer(
            attempt, self._breaker.run, lambda: self.store.acquire(attempt.key, claim)
        )

    def ask(self, attempt: Attempt, begin: Begin) -> Answer:
        """As ``acquire``, with a store that decides while the caller does something else."""
        claim = claim_of(attempt)
        wait = self._answer(attempt, self._breaker.ask, lambda: begin(attempt.key, claim))
        return Answer(lambda: self._answer(attempt, self._breaker.hear, wait))

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
    ) -> Callable[[], list[Acquired]]:
        """Ask for many locks together; what becomes of each is as if it was asked for alone.

        What is returned waits for that, once, or raises that the store does not answer. A store
        that can do so decides meanwhile. It is told of others, ``published``, on the way.
        """
        claims = [(attempt.key, claim_of(attempt)) for attempt in attempts]
        begin: BeginMany | None = getattr(self.store, "begin_acquire_many", None)
        if not attempts:
            self.confirm_many(published)
            return list
        if begin is None:
            self.confirm_many(published)
            return lambda: self._answers(
                attempts, self._breaker.run, lambda: self.store.acquire_many(claims)
            )
        told = confirmed_of(published)
        try:
            wait = self._answers(attempts, self._breaker.ask, lambda: begin(claims, told))
        except StoreUnavailable as error:
            self.confirm_many(published)  # as soon as it answers
            return partial(_raise, error)
        return lambda: self._answers(attempts, self._breaker.hear, wait)

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
