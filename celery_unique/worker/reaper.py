"""Reaps followers whose task is gone: killed with its worker, or never published.

Runs in a thread of its own, which also runs the jobs that the worker's main loop must not wait
for. Each round costs one query for what is due, however many locks there are.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.promote import reap_orphans

from .lock_client import WorkerLockClient

if TYPE_CHECKING:
    from celery_unique.publish.stale_holders.healing import StaleHolders

logger = logging.getLogger("celery_unique")


#: The lapse of a dead holder's lease is noticed within a third of it.
ROUNDS_PER_LEASE = 3
#: So that workers that started together do not reap together for ever: a round comes up to so much
#: earlier, and never later.
JITTER = 0.4
#: Each query returns some of what is due; a key that was reaped is not due for a while.
QUERIES = 100
#: How long a stopping worker waits for what its main loop has left to do.
LAST_JOBS_S = 5.0

Job = Callable[[], object]


class Reaper:
    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._jobs: deque[Job] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._stale_holders: StaleHolders | None = None

    def start(self) -> None:
        self._app_state.background = self.submit
        self._thread = threading.Thread(target=self._work, name="celery_unique.reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Other workers do what is left, once the leases of this one have lapsed."""
        self._app_state.background = None
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST_JOBS_S)

    def submit(self, job: Job) -> bool:
        """Run ``job`` soon. False: the thread is stopping."""
        if self._stopping or os.getpid() != self._pid:  # a forked child has no such thread
            return False
        self._jobs.append(job)
        self._wake.set()
        return True

    def _work(self) -> None:
        reap_at = time.monotonic() + self._pause_s()
        while not (self._stopping and not self._jobs):
            self._wake.wait(max(0.0, reap_at - time.monotonic()))
            self._wake.clear()
            while self._jobs:
                self._run(self._jobs.popleft())
            if time.monotonic() >= reap_at and not self._stopping:
                self._run(self.reap)
                reap_at = time.monotonic() + self._pause_s()

    def _pause_s(self) -> float:
        run_s = self._app_state.leases.run_ms / 1000
        return run_s / ROUNDS_PER_LEASE * random.uniform(1 - JITTER, 1)

    def _run(self, job: Job) -> None:
        try:
            job()
        except StoreUnavailable as error:
            reporting.store_error(self._app_state.app, "reap", error, "", "", "")
        except Exception:
            # One bad round must not end the thread: followers would wait for ever.
            logger.exception("reaping followers failed; it is retried")

    def reap(self) -> None:
        """Go through what is due. A key that fails does not delay the others."""
        store = self._app_state.part(WorkerLockClient).store
        for _ in range(QUERIES):
            keys = store.due()
            for key in keys:
                if self._stopping:
                    return
                self._run(partial(self._reap_key, key))
            if not keys:
                return

    def _reap_key(self, key: str) -> None:
        if not reap_orphans(self._app_state, key) and self._free_lane(key):
            reap_orphans(self._app_state, key)

    def _free_lane(self, key: str) -> bool:
        """Release tasks for which parked calls wait, and whose messages are lost. No call of the
        lane may ever come again to find them."""
        app_state = self._app_state
        record, now = app_state.store.read(key)
        if not record.parked:
            return False
        check_after_ms = app_state.settings.check_after.total_seconds() * 1000
        waiting = [
            task_id
            for task_id, task in record.tasks.items()
            if task.waiting and now - max(task.created_at, task.eta) >= check_after_ms
        ]
        if not waiting:
            return False
        if self._stale_holders is None:
            from celery_unique.publish.stale_holders.healing import StaleHolders  # rarely needed

            self._stale_holders = StaleHolders(app_state)
        return any(self._stale_holders.heal(key, task_id) for task_id in waiting)
