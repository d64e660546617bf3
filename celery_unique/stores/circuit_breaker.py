"""Do not ask a store that has just proved to be silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord

from .base import LockStore, shard_of

Reply = TypeVar("Reply")

FAILURES_TO_OPEN = 2
OPEN_FOR_S = 5.0


class StoreSkipped(StoreUnavailable):
    """The store was not even asked: nothing can have happened in it."""


class Breaker:
    """After two failures in a row the store is skipped for five seconds.

    Each caller would otherwise wait out the whole time-out, and a web process
    that serves many of them would stand still with the store.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._closed_again_at = 0.0
        self.failed_at = -math.inf
        self._mutex = threading.Lock()

    def run(self, act: Callable[[], Reply]) -> Reply:
        """Carry ``act`` out, or raise at once while the store is skipped."""
        self._check()
        return self.hear(act)

    def ask(self, act: Callable[[], Reply]) -> Reply:
        """As ``run``, for an act that does not wait for the store's answer: that is heard later."""
        self._check()
        return self._counted(act)

    def hear(self, act: Callable[[], Reply]) -> Reply:
        """Carry ``act`` out in any case: the store has been asked, and this is its answer."""
        reply = self._counted(act)
        self.count(None)
        return reply

    def _counted(self, act: Callable[[], Reply]) -> Reply:
        try:
            return act()
        except StoreUnavailable as error:
            self.count(error)
            raise

    def count(self, error: StoreUnavailable | None) -> None:
        """The store has answered, or it has not."""
        if error is None or isinstance(error, UnreadableRecord):  # of which one key is wrong
            if self._failures:
                self._failures = 0
            return
        with self._mutex:
            self._failures += 1
            self.failed_at = time.monotonic()
            self._closed_again_at = self.failed_at + OPEN_FOR_S

    def skips(self) -> StoreSkipped | None:
        """The error of what is not asked now."""
        if self._failures < FAILURES_TO_OPEN or time.monotonic() >= self._closed_again_at:
            return None
        return StoreSkipped(
            f"The lock store failed {self._failures} times in a row and is left alone "
            f"for {OPEN_FOR_S:.0f} seconds. Check that it runs and can be reached."
        )

    def _check(self) -> None:
        error = self.skips()
        if error is not None:
            raise error


class Breakers:
    """One breaker for each part of the store that can fail by itself: the dead node of a cluster
    does not keep the others from being asked. One in all for a store without such parts."""

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self._by_shard: dict[str, Breaker] = {}

    def of(self, key: str) -> Breaker:
        shard = shard_of(self._store, key)
        breaker = self._by_shard.get(shard)
        if breaker is None:  # two threads may make it: the same one for both
            breaker = self._by_shard.setdefault(shard, Breaker())
        return breaker

    @property
    def failed_at(self) -> float:
        """When the store, or a part of it, last did not answer."""
        breakers = list(self._by_shard.values())
        return max((breaker.failed_at for breaker in breakers), default=-math.inf)
