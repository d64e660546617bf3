"""Releases locks, which stops no task, and revokes tasks that wait, which frees their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery.app.control import Control

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.policy.states import TERMINAL
from celery_unique.publish.revoke import cancel
from celery_unique.publish.stale_holders.lock_view import LockView
from celery_unique.publish.stale_holders.workers import broker_errors, check_broker


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


def revoke_all(app_state: AppState, locks: Iterable[LockView]) -> Iterator[tuple[LockView, bool]]:
    """Revoke the task of each lock, and yield it with whether it had not started.

    One that runs is not stopped. As ``app.control.revoke``, but the keys are known and not
    searched for. Raises BrokerUnavailable.
    """
    held = [lock for lock in locks if lock.task_id and lock.state not in TERMINAL]
    # Workers first: one of them may be about to start the task. Where the broker has no remote
    # control, its worker drops the message when it receives it.
    if held and not check_broker(app_state.app):
        with broker_errors():
            Control.revoke(app_state.app.control, [lock.task_id for lock in held])
    for lock in held:
        yield lock, cancel(app_state, lock.key, lock.task_id)
