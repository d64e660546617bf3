"""Whether a task that waits by its record has ended by the result backend."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery import states

from celery_unique.followers.complete import ready_meta
from celery_unique.stores.record import State

from .lock_view import LockView

#: How far apart the clocks of a worker and of the store may be.
SKEW_MS = 60_000
#: How much later than its creation an id that can be used again must have ended.
LATER_MS = 5000

END_OF = {
    states.SUCCESS: State.COMPLETED,
    states.FAILURE: State.DISCARDED,
    states.REVOKED: State.CANCELLED,
}


def ended_as(app: Any, lock: LockView) -> str:
    """The state in which the task has ended; empty where it has not, or that cannot be read.

    A caller that chooses ids can use one again: a result of its earlier life is no proof.
    """
    meta = ready_meta(app, lock.entry.task_name, lock.task_id)
    if meta is None or meta["status"] not in END_OF:
        return ""
    ended_at = _ended_at_ms(meta.get("date_done"))
    if lock.entry.id_given:
        is_of_this_life = ended_at is not None and ended_at >= lock.entry.created_at + LATER_MS
    else:
        is_of_this_life = ended_at is None or ended_at >= lock.entry.created_at - SKEW_MS
    return str(meta["status"]) if is_of_this_life else ""


def _ended_at_ms(date_done: Any) -> float | None:
    """None where it is unknown: a time without a zone is the database's own."""
    if isinstance(date_done, str):
        try:
            date_done = datetime.fromisoformat(date_done)
        except ValueError:
            return None
    if not isinstance(date_done, datetime) or date_done.tzinfo is None:
        return None
    return date_done.timestamp() * 1000
