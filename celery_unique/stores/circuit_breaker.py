"""Circuit breaker for the lock store."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord

from .base import LockStore

Reply = TypeVar("Reply")

FAILURES_TO_OPEN = 2
OPEN_FOR_S = 5.0


class StoreSkipped(StoreUnavailable):
    """The circuit is open, and the store was not used: nothing can have happened in it."""


class PushRefused(StoreUnavailable):
    """The server has replied, and pushes no message to this queue: nothing has changed in it."""


class Breaker:
    """Opens for five seconds after two consecutive failures.

    Otherwise each caller would wait for the whole time-out, and a web process that serves many
    of them would block with the store.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._closed_again_at = 0.0
        self.failed_at = -math.inf
        self._mutex = threading.Lock()

    def run(self, act: Callable[[], Reply]) -> Reply:
        """Apply ``act``, or raise immediately while the circuit is open."""
        self.check()
        try:
            reply = act()
        except StoreUnavailable as error:
            self.count(error)
            raise
        self.count(None)
        return reply

    def count(self, error: StoreUnavailable | None) -> None:
        """Record that the store has replied, or has not."""
        # One key is concerned, or one queue.
        if error is None or isinstance(error, (UnreadableRecord, PushRefused)):
            if self.failures:
                self.failures = 0
            return
        with self._mutex:
            self.failures += 1
            self.failed_at = time.monotonic()
            self._closed_again_at = self.failed_at + OPEN_FOR_S

    def skips(self) -> StoreSkipped | None:
        """The error of an act while the circuit is open; None while it is closed."""
        if self.failures < FAILURES_TO_OPEN or time.monotonic() >= self._closed_again_at:
            return None
        return StoreSkipped(
            f"The lock store failed {self.failures} times in a row; its circuit is open for "
            f"{OPEN_FOR_S:.0f} seconds. Check that it runs and can be reached."
        )

    def check(self) -> None:
        error = self.skips()
        if error is not None:
            raise error


class Breakers:
    """One breaker for each part of the store that can fail separately, such as the nodes of a
    cluster; a single one for a store without such parts."""

    def __init__(self, store: LockStore) -> None:
        #: None for a store with parts.
        self.only = None if hasattr(store, "shard_of") else Breaker()
        self._shard_of: Callable[[str], str] = getattr(store, "shard_of", str)
        self._by_shard: dict[str, Breaker] = {}

    def of(self, key: str) -> Breaker:
        if self.only is not None:
            return self.only
        shard = self._shard_of(key)
        breaker = self._by_shard.get(shard)
        if breaker is None:  # two threads may create it: the same one for both
            breaker = self._by_shard.setdefault(shard, Breaker())
        return breaker

    @property
    def failed_at(self) -> float:
        """When the store, or a part of it, last did not reply."""
        breakers = [self.only] if self.only is not None else list(self._by_shard.values())
        return max((breaker.failed_at for breaker in breakers), default=-math.inf)
