"""A thread that runs fire-and-forget acts in the order in which they came."""

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
from typing import Any, Protocol

from celery_unique.exceptions import StoreUnavailable

logger = logging.getLogger(__name__)


Act = Callable[[], Any]

#: How long the thread waits for another act before it ends; the next act starts a new one.
IDLE_S = 5.0


class FireAndForgetQueue:
    """A bounded queue of acts and the daemon thread that runs them.

    Never raises into the caller: an act that failed is logged. If the queue is full, a caller
    first waits for room, and then runs its act itself.
    """

    def __init__(self, timeout_s: float, limit: int = 10_000) -> None:
        self.timeout_s = timeout_s
        self._limit = limit
        self.reset()
        register(self)

    def reset(self) -> None:
        """Also in a forked child: the parent has the thread and runs what it queued."""
        # Entered in one step: a signal in ``Condition.__enter__`` could leave it locked for ever.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting: deque[Act] = deque()
        self._thread: threading.Thread | None = None
        self._put = 0  # acts accepted so far
        self._finished = 0  # acts that ran or failed so far

    def put(self, act: Act) -> None:
        with self._mutex:
            self._changed.wait_for(lambda: len(self._waiting) < self._limit, self.timeout_s)
            if len(self._waiting) < self._limit and self._start_thread():
                self._waiting.append(act)
                self._put += 1
                self._changed.notify_all()
                return
        _run(act)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for every act put so far; StoreUnavailable if there is no progress.

        Or, with a time-out, if they have not finished by then: many can take long, too.
        """
        if timeout_s is not None:
            left = self.drain(timeout_s)
            if left:
                raise _unfinished(left, timeout_s)
            return
        with self._mutex:
            goal = self._put
            while (before := self._finished) < goal:
                # An act that fails takes the whole time-out: twice that is no progress.
                self._changed.wait_for(lambda: self._finished != before, 2 * self.timeout_s)
                if self._finished == before:
                    raise _unfinished(goal - before, 2 * self.timeout_s)

    def drain(self, timeout_s: float) -> int:
        """Wait at most so long for every act put so far; returns how many are left."""
        with self._mutex:
            goal = self._put
            self._changed.wait_for(lambda: self._finished >= goal, timeout_s)
            return max(0, goal - self._finished)

    def report_left(self, left: int, within_s: float) -> None:
        logger.warning(
            "%d fire-and-forget acts on the lock store did not finish within %.1f s of exit",
            left,
            within_s,
        )

    def is_current(self) -> bool:
        """Whether this is the queue's thread, and not a caller that runs its act itself."""
        return threading.current_thread() is self._thread

    def _start_thread(self) -> bool:
        if self._thread is None:
            name = "celery_unique fire-and-forget"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                return False
            self._thread = thread
            drain_when_this_process_ends()
        return True

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                    # Under the same mutex as put(): no act can come in between.
                    self._thread = None
                    return
                act = self._waiting.popleft()
            _run(act)
            del act
            with self._mutex:
                self._finished += 1
                self._changed.notify_all()


def _unfinished(left: int, within_s: float) -> StoreUnavailable:
    return StoreUnavailable(
        f"{left} fire-and-forget acts on the lock store did not finish within {within_s:g} s"
    )


def _run(act: Act) -> None:
    try:
        act()
    except StoreUnavailable as error:
        logger.warning("fire-and-forget act on the lock store failed: %s", error)
    except Exception as error:
        # Its text could contain a key, which is never logged above DEBUG.
        logger.warning("fire-and-forget act on the lock store failed: %s", type(error).__name__)
        logger.debug("fire-and-forget act", exc_info=True)


class Drained(Protocol):
    """A queue whose acts a process runs before it ends; a forked child has none of them."""

    timeout_s: float

    def drain(self, timeout_s: float) -> int:
        """Wait at most so long; returns how many acts are left."""

    def report_left(self, left: int, within_s: float) -> None: ...

    def reset(self) -> None: ...


#: Every queue of this process: drained at exit, reset in a fork.
_queues: weakref.WeakSet[Drained] = weakref.WeakSet()
_drained_at_end_of: int | None = None


def register(queue: Drained) -> None:
    _queues.add(queue)


def _drain_all() -> None:
    began = time.monotonic()
    for queue in list(_queues):
        # Each has its own time-out, which all of them started with the first one.
        left = queue.drain(max(0.0, began + queue.timeout_s - time.monotonic()))
        if left:
            queue.report_left(left, time.monotonic() - began)


def drain_when_this_process_ends() -> None:
    """Children of multiprocessing and billiard run finalizers instead of atexit's functions."""
    global _drained_at_end_of
    if _drained_at_end_of == os.getpid():
        return
    _drained_at_end_of = os.getpid()
    for name in ("multiprocessing.util", "billiard.util"):
        module: Any = sys.modules.get(name)
        if module is not None:
            module.Finalize(None, _drain_all, exitpriority=0)


def _reset_in_child() -> None:
    for queue in list(_queues):
        queue.reset()


atexit.register(_drain_all)
os.register_at_fork(after_in_child=_reset_in_child)
