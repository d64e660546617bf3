"""Releases locks, one by one: no task is stopped, and each release is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.publish.stale_holders.lock_view import LockView


def release_all(app_state: AppState, locks: Iterable[LockView]) -> Iterator[tuple[LockView, bool]]:
    """Release each lock, and yield it with whether it was still held.

    By key *and* task: a lock that another task has acquired meanwhile is not released.
    """
    for lock in locks:
        released = app_state.store.release(lock.key, lock.task_id or None) > 0
        if released and lock.task_id:
            reporting.released(
                lock.entry.task_name,
                lock.task_id,
                app=app_state.app,
                key=lock.key,
                reason=reporting.MANUAL,
            )
        yield lock, released
