"""Acts that could not be carried out now and must not be forgotten.

Giving a lock back is retried in the background while the process lives: a lock
that nobody gives back is stuck until its lease ends.
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


class RetryQueue:
    """Retries acts one after another, in a daemon thread that lives while there are any.

    Those of one key stay in order. A part of the store that does not answer is asked once a
    round, each time for another key, and keeps those of the other parts from nothing.
    """

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self._start_anew()
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        # A forked child has no thread, and its parent carries out the parent's acts.
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
    ) -> None:
        """Carry ``run`` out as soon as the store answers, and not before ``after_s`` have
        passed; give up after ``within_s``."""
        now = time.monotonic()
        with self._mutex:
            self._acts.append(_Act(what, run, now + after_s, now + within_s, key))
            # Not alive: a signal came before it was started, and nobody would start it.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="celery_unique.later", daemon=True
                )
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
        """Try every act once, but for those behind one that the store does not answer: of the
        same key, and of the same part of the store. Whether none was left for that."""
        silent: set[str] = set()
        for act in list(self._acts):
            now = time.monotonic()
            shard = shard_of(self._store, act.key)
            if now < act.not_before or shard in silent:
                continue
            if now > act.give_up_at:
                logger.warning("gave up: %s (the lease ends the lock)", act.what)
            else:
                try:
                    act.run()
                except UnreadableRecord as error:
                    logger.warning("gave up: %s (%s)", act.what, error)
                except StoreUnavailable:
                    silent.add(shard)
                    self._put_behind_the_others(act.key)
                    continue
                except Exception:
                    # Without this thread no other act would be carried out either.
                    logger.exception("could not be carried out: %s", act.what)
                else:
                    logger.info("carried out late: %s", act.what)
            with self._mutex:
                self._acts.remove(act)
        return not silent

    def _put_behind_the_others(self, key: str) -> None:
        """A key that the store never answers for must not be the only one that is tried."""
        with self._mutex:
            self._acts.sort(key=lambda act: act.key == key)
