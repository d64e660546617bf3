"""Acts that are retried in the background while the store is unavailable.

A release, for example: a lock that is not released is held until its lease ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord

from .base import LockStore, shard_of

logger = logging.getLogger(__name__)


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class _Act:
    what: str
    run: Callable[[], object]
    not_before: float
    give_up_at: float
    key: str
    is_check: bool


class RetryQueue:
    """Retries acts one after another, in a daemon thread that lives while there are any.

    Those of one key stay in order. A part of the store that is unavailable is tried once a round,
    each time for another key, and does not delay the acts on other parts.
    """

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
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
    ) -> None:
        """Call ``run`` until the store answers, first after ``after_s``; give up after
        ``within_s``. ``is_check``: nothing has failed, and its success is no news."""
        now = time.monotonic()
        with self._mutex:
            self._acts.append(_Act(what, run, now + after_s, now + within_s, key, is_check))
            # Not alive: a signal came before it was started.
            if self._thread is None or not self._thread.is_alive():
                name = "celery_unique retry queue"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def waiting(self) -> int:
        return len(self._acts)

    def _work(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            time.sleep(pause)
            if self._one_round():
                pause = FIRST_PAUSE_S
            else:
                pause = min(pause * 2, LONGEST_PAUSE_S)
            with self._mutex:
                if not self._acts:
                    self._thread = None
                    return

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
                logger.warning("gave up: %s (the lease ends the lock)", act.what)
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
