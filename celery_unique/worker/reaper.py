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

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.promote import reap_orphans

from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")


#: The lapse of a dead holder's lease is noticed within a third of it.
ROUNDS_PER_LEASE = 3
#: So that workers that started together do not reap together for ever.
JITTER = 0.25
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
        return run_s / ROUNDS_PER_LEASE * random.uniform(1 - JITTER, 1 + JITTER)

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
                self._run(partial(reap_orphans, self._app_state, key))
            if not keys:
                return
