"""One thread that carries out the acts nobody waits for, in the order they came."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_unique.exceptions import StoreUnavailable

logger = logging.getLogger(__name__)


Act = Callable[[], Any]

#: How long the thread waits for another act before it ends; the next act starts a new one.
IDLE_S = 5.0


class FireAndForgetQueue:
    """A bounded queue of acts and the daemon thread that carries them out.

    Never raises into the caller: an act that failed is logged. With the queue
    full a caller first waits for room, and then carries its act out itself.
    """

    def __init__(self, timeout_s: float, limit: int = 10_000) -> None:
        self._timeout_s = timeout_s
        self._limit = limit
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        # Entered in one step: a signal in ``Condition.__enter__`` could leave it taken for ever.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting: deque[Act] = deque()
        self._thread: threading.Thread | None = None
        self._put = 0  # acts accepted so far
        self._over = 0  # acts carried out or failed so far

    def put(self, act: Act) -> None:
        with self._mutex:
            self._changed.wait_for(lambda: len(self._waiting) < self._limit, self._timeout_s)
            if len(self._waiting) < self._limit and self._has_thread():
                self._waiting.append(act)
                self._put += 1
                self._changed.notify_all()
                return
        _carry_out(act)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for every act put so far; StoreUnavailable when they do not get on.

        Or, with a time-out, when they are not over by then: many that get on take long, too.
        """
        if timeout_s is not None:
            left = self.drain(timeout_s)
            if left:
                raise _not_carried_out(left, timeout_s)
            return
        with self._mutex:
            goal = self._put
            while self._over < goal:
                over = self._over
                # An act that fails takes the whole time-out: twice that is no progress.
                if not self._changed.wait_for(self._moved_on_from(over), 2 * self._timeout_s):
                    raise _not_carried_out(goal - self._over, 2 * self._timeout_s)

    def drain(self, timeout_s: float) -> int:
        """Wait at most so long for every act put so far: how many are left."""
        with self._mutex:
            goal = self._put
            self._changed.wait_for(lambda: self._over >= goal, timeout_s)
            return max(0, goal - self._over)

    def is_current(self) -> bool:
        """Whether this is the thread that carries acts out, and not a caller that must."""
        return threading.current_thread() is self._thread

    def forget(self) -> None:
        """In a forked child: the parent has the thread and carries out what it queued."""
        self._begin()

    def _moved_on_from(self, over: int) -> Callable[[], bool]:
        return lambda: self._over != over

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="celery_unique one-way", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                return False
            self._thread = thread
            _drain_when_this_process_ends()
        return True

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                    # Under the same mutex as put(): no act can come in between.
                    self._thread = None
                    return
                act = self._waiting.popleft()
            _carry_out(act)
            del act
            with self._mutex:
                self._over += 1
                self._changed.notify_all()


def _not_carried_out(left: int, within_s: float) -> StoreUnavailable:
    return StoreUnavailable(
        f"{left} one-way acts on the lock store were not carried out within {within_s:g} s"
    )


def _carry_out(act: Act) -> None:
    try:
        act()
    except StoreUnavailable as error:
        logger.warning("A one-way act on the lock store failed: %s", error)
    except Exception as error:
        # Its text could hold a key, which is never logged above DEBUG.
        logger.warning("A one-way act on the lock store failed: %s", type(error).__name__)
        logger.debug("One-way act", exc_info=True)


#: Every queue of this process, for what must happen to all at exit and in a fork.
_queues: weakref.WeakSet[FireAndForgetQueue] = weakref.WeakSet()
_drained_at_end_of: int | None = None


def _drain_all() -> None:
    began = time.monotonic()
    for queue in list(_queues):
        # Each has its own time-out, and all of them had time since the first one was waited for.
        left = queue.drain(max(0.0, began + queue._timeout_s - time.monotonic()))
        if left:
            logger.warning(
                "%d one-way acts on the lock store were not carried out within %.1f s of the exit",
                left,
                time.monotonic() - began,
            )


def _drain_when_this_process_ends() -> None:
    """Children of multiprocessing and billiard run finalizers instead of atexit's functions."""
    global _drained_at_end_of
    if _drained_at_end_of == os.getpid():
        return
    _drained_at_end_of = os.getpid()
    for name in ("multiprocessing.util", "billiard.util"):
        module: Any = sys.modules.get(name)
        if module is not None:
            module.Finalize(None, _drain_all, exitpriority=0)


def _forget_in_child() -> None:
    for queue in _queues:
        queue.forget()


atexit.register(_drain_all)
os.register_at_fork(after_in_child=_forget_in_child)
