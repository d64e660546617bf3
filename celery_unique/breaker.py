"""Do not ask a store that has just proved to be silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .exceptions import StoreUnavailable

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
        if self._failures:
            self._failures = 0
        return reply

    def _counted(self, act: Callable[[], Reply]) -> Reply:
        try:
            return act()
        except StoreUnavailable:
            with self._mutex:
                self._failures += 1
                self.failed_at = time.monotonic()
                self._closed_again_at = self.failed_at + OPEN_FOR_S
            raise

    def _check(self) -> None:
        if self._failures >= FAILURES_TO_OPEN and time.monotonic() < self._closed_again_at:
            raise StoreSkipped(
                f"The lock store failed {self._failures} times in a row and is left alone "
                f"for {OPEN_FOR_S:.0f} seconds. Check that it runs and can be reached."
            )
