"""Acts that are retried in the background while the store is unavailable.

A release, for example: a lock that is not released is held until its lease ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord

from .base import LockStore, shard_of
from .fire_and_forget import drain_when_this_process_ends, register

logger = logging.getLogger(__name__)


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 1.0
#: How often a process that ends looks whether its acts are done.
LOOK_S = 0.01


@dataclass(slots=True)
class _Act:
    what: str
    run: Callable[[], object]
    not_before: float
    give_up_at: float
    key: str
    is_check: bool
    otherwise: str


class RetryQueue:
    """Retries acts one after another, in a daemon thread that lives while there are any.

    Those of one key stay in order. A part of the store that is unavailable is tried once a round,
    each time for another key, and does not delay the acts on other parts. A process that ends waits
    for them, for at most ``timeout_s``.
    """

    def __init__(self, store: LockStore, timeout_s: float = 2.0) -> None:
        self._store = store
        self.timeout_s = timeout_s
        self.reset()
        register(self)

    def reset(self) -> None:
        # A forked child has no thread, and its parent runs the parent's acts.
        self._acts: list[_Act] = []
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def retry(
        self,
        key: str,
        what: str,
        run: Callable[[], object],
        within_s: float,
        *,
        after_s: float = 0.0,
        is_check: bool = False,
        otherwise: str = "the lease ends the lock",
    ) -> None:
        """Call ``run`` until the store answers, first after ``after_s``; give up after
        ``within_s``: then ``otherwise``. ``is_check``: nothing has failed, and its success is no
        news."""
        now = time.monotonic()
        act = _Act(what, run, now + after_s, now + within_s, key, is_check, otherwise)
        with self._mutex:
            self._acts.append(act)
            # Not alive: a signal came before it was started.
            if self._thread is None or not self._thread.is_alive():
                name = "celery_unique retry queue"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
                drain_when_this_process_ends()

    def waiting(self) -> int:
        return len(self._acts)

    def drain(self, timeout_s: float) -> int:
        """Wait at most so long for acts that are due by then; returns how many are left."""
        until = time.monotonic() + timeout_s
        while left := len(self._due_by(until)):
            pause = min(LOOK_S, until - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
        return left

    def report_left(self, _left: int, within_s: float) -> None:
        for act in self._due_by(time.monotonic()):
            logger.warning(
                "not done when the process ended, after %.1f s: %s (%s)",
                within_s,
                act.what,
                act.otherwise,
            )

    def _due_by(self, moment: float) -> list[_Act]:
        return [act for act in list(self._acts) if not act.is_check and act.not_before < moment]

    def _work(self) -> None:
        pause = 0.0
        while True:
            if self._one_round():
                pause = FIRST_PAUSE_S
            else:
                pause = min(max(FIRST_PAUSE_S, pause * 2), LONGEST_PAUSE_S)
            with self._mutex:
                if not self._acts:
                    self._thread = None
                    return
            time.sleep(pause)

    def _one_round(self) -> bool:
        """Try every act once, except behind a failed one of the same part of the store; returns
        whether all parts were available."""
        unavailable: set[str] = set()
        for act in list(self._acts):
            now = time.monotonic()
            shard = shard_of(self._store, act.key)
            if now < act.not_before or shard in unavailable:
                continue
            if now > act.give_up_at:
                logger.warning("gave up: %s (%s)", act.what, act.otherwise)
            else:
                try:
                    act.run()
                except UnreadableRecord as error:
                    logger.warning("gave up: %s (%s)", act.what, error)
                except StoreUnavailable:
                    unavailable.add(shard)
                    self._move_to_the_end(act.key)
                    continue
                except Exception:
                    # Without this thread no other act would run either.
                    logger.exception("retry failed: %s", act.what)
                else:
                    if not act.is_check:
                        logger.info("retry succeeded: %s", act.what)
            with self._mutex:
                self._acts.remove(act)
        return not unavailable

    def _move_to_the_end(self, key: str) -> None:
        """A key whose acts always fail must not be the only one that is tried."""
        with self._mutex:
            self._acts.sort(key=lambda act: act.key == key)
