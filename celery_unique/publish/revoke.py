"""Revoke of a queued task: its key is freed immediately, and its message does not run.

The key of a task is known from its result, or because this process published it.
For any other id the store is scanned, for a bounded time: a revoke is an administrator's
act, not one of the publishing or working path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from celery.app.control import Control
from celery.utils.functional import maybe_list

from celery_unique import reporting
from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import CeleryUniqueError, StoreUnavailable
from celery_unique.followers.promote import reap_orphans
from celery_unique.keys.digest import guard_key
from celery_unique.stores.record import State

from .coordinator import UniqueTaskCoordinator

logger = logging.getLogger("celery_unique")


#: A walk that took longer than this is not repeated for a while.
LONG_WALK_S = 0.2
FRESH_FOR_S = 5.0


class UniqueControl(Control):
    """Celery's remote control, which also cancels a revoked task in the lock store."""

    def revoke(self, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        # Workers first: one of them may be about to start the task.
        reply = super().revoke(task_id, *args, **kwargs)
        free_keys(state_of(self.app), maybe_list(task_id) or ())
        return reply


def free_keys(app_state: AppState, task_ids: Iterable[str]) -> int:
    """Cancel the tasks that have not started. How many keys were freed."""
    freed = 0
    began = time.monotonic()
    for task_id in task_ids:
        try:
            published = app_state.part(UniqueTaskCoordinator).client.published
            key = published.get(task_id) or _search(app_state, task_id, began)
            if key is None and _guards(app_state):
                key = guard_key(task_id)  # marked before its start, it does not run later
            if key is not None and cancel(app_state, key, task_id):
                freed += 1
        except CeleryUniqueError as error:
            # The workers have the revoke: the key is free when one receives the message.
            logger.warning("the key of revoked task %s is not free yet: %s", task_id, error)
    return freed


def _guards(app_state: AppState) -> bool:
    """Whether a worker of this app may guard a task that has no key."""
    return any(app_state.is_guarded(name, task) for name, task in app_state.app.tasks.items())


def cancel(app_state: AppState, key: str, task_id: str) -> bool:
    """Whether the task had not started; one that runs ends by being terminated."""
    mark_ms = app_state.leases.queue_ms
    record, _ = app_state.store.read(key)
    cancelled = app_state.store.cancel(key, task_id, mark_ms) == "cancelled"
    if cancelled and task_id in record.tasks:
        logger.info("task %s was revoked before it started: its key is free", task_id)
        name = record.tasks[task_id].task_name
        reporting.released(name, task_id, app=app_state.app, key=key, reason=str(State.CANCELLED))
    if cancelled and record.following:
        # Its followers are revoked with it; or it was itself a follower.
        app_state.in_background(lambda: _revoke_followers(app_state, key))
    return cancelled


def _revoke_followers(app_state: AppState, key: str) -> None:
    try:
        reap_orphans(app_state, key)
    except Exception:
        # The task is revoked anyway: a worker completes its followers in its next round.
        logger.warning("followers of a revoked task are not revoked yet", exc_info=True)


def _search(app_state: AppState, task_id: str, began: float) -> str | None:
    """The key of an id that another process has published, perhaps a moment ago."""
    walked_at, took_s, found = app_state.found_keys
    # A revoke of many ids walks once; and a long walk is not repeated for each revoke.
    fresh = walked_at >= began or (took_s > LONG_WALK_S and began - walked_at < FRESH_FOR_S)
    if task_id not in found and not fresh:
        try:
            found = _walk(app_state)
        except StoreUnavailable:
            found = app_state.found_keys[2]
            if task_id not in found:
                raise
    return found.get(task_id)


def _walk(app_state: AppState) -> dict[str, str]:
    began = time.monotonic()
    give_up_at = began + app_state.settings.store_timeout.total_seconds()
    found: dict[str, str] = {}
    try:
        for key, record in app_state.store.walk():
            found.update(dict.fromkeys(record.tasks, key))
            if record.parked:
                found.update(dict.fromkeys(app_state.store.parked(key), key))
            if time.monotonic() > give_up_at:
                logger.info("too many locks to look through: a revoked task frees its key later")
                break
    finally:  # of a cluster with a dead node, those of the others
        app_state.found_keys = (began, time.monotonic() - began, found)
    return found
