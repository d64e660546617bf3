"""A worker that dies, all of it at once, between two steps at the end of a task."""

from __future__ import annotations

import os
import signal
from typing import Any

from billiard.pool import ApplyResult
from celery import Celery, states

from celery_unique.worker.lock_client import WorkerLockClient

#: Before which step it dies.
DIES_BEFORE = "FAULTS_DIES_BEFORE"
RESULT = "result"
SETTLING = "settling"
#: Not at all: Celery does not notice that a body has ended, as now and then in a warm shutdown.
READS_NOTHING = "reads nothing"


def die_in_time(app: Celery) -> None:
    """Where the environment asks for it."""
    step = os.environ.get(DIES_BEFORE)
    if step == RESULT:
        _die_before_the_result(type(app.backend))
    elif step == SETTLING:
        WorkerLockClient.settle = _die  # type: ignore[method-assign]
    elif step == READS_NOTHING:
        ApplyResult._set = lambda *_: None


def _die_before_the_result(backend: Any) -> None:
    store_result = backend.store_result

    def die_or_store(self: Any, task_id: str, result: Any, state: str, **options: Any) -> Any:
        if state == states.SUCCESS:
            _die()
        return store_result(self, task_id, result, state, **options)

    backend.store_result = die_or_store


def _die(*_: Any, **__: Any) -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)
