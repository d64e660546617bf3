"""Releasing what a visitor has seen, and nothing that came after it."""

from __future__ import annotations

from collections.abc import Sequence

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.locks import Lock, holders_of
from celery_unique.operations.select import is_key


def read_selection(app_state: AppState, selected: Sequence[str]) -> tuple[list[Lock], int]:
    """The locks behind values of the form ``key task_id``, and how many are not there.

    Naming the holder matters: since the page was made, the lock may have been freed and
    taken by another task, which nobody has asked to release.
    """
    locks, gone = [], 0
    for value in selected:
        key, _, task_id = value.partition(" ")
        lock = _holder(app_state, key, task_id) if is_key(key) else None
        if lock is None:
            gone += 1
        else:
            locks.append(lock)
    return locks, gone


def let_go(app_state: AppState, lock: Lock) -> bool:
    """Release this very holder. Whether it still held its key."""
    if not app_state.store.release(lock.key, lock.task_id):
        return False
    reporting.released(app_state.app, lock.task_name, lock.task_id, lock.key, "released by hand")
    return True


def _holder(app_state: AppState, key: str, task_id: str) -> Lock | None:
    record, now = app_state.store.read(key)
    return next((lock for lock in holders_of(key, record, now) if lock.task_id == task_id), None)
