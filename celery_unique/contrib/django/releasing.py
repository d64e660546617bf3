"""Releasing what a visitor has seen, and nothing that came after it."""

from __future__ import annotations

from collections.abc import Sequence

from celery_unique import reports
from celery_unique.locks import Lock, holders_of
from celery_unique.operations.selecting import is_key
from celery_unique.runtime import Runtime

from .listing import PER_PAGE


def read_selection(runtime: Runtime, selected: Sequence[str]) -> tuple[list[Lock], int]:
    """The locks behind values of the form ``key task_id``, and how many are not there.

    Naming the holder matters: since the page was made, the lock may have been freed and
    taken by another task, which nobody has asked to release.
    """
    locks, gone = [], 0
    for value in selected[:PER_PAGE]:
        key, _, task_id = value.partition(" ")
        lock = _holder(runtime, key, task_id) if is_key(key) else None
        if lock is None:
            gone += 1
        else:
            locks.append(lock)
    return locks, gone


def let_go(runtime: Runtime, lock: Lock) -> bool:
    """Release this very holder. Whether it still held its key."""
    if not runtime.store.release(lock.key, lock.task_id):
        return False
    reports.released(runtime.app, lock.task_name, lock.task_id, lock.key, "released by hand")
    return True


def _holder(runtime: Runtime, key: str, task_id: str) -> Lock | None:
    record, now = runtime.store.read(key)
    return next((lock for lock in holders_of(key, record, now) if lock.task_id == task_id), None)
