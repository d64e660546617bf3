"""The end of a task that another one has replaced before it ran."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery.app.task import Context

from celery_unique.exceptions import DuplicateTask
from celery_unique.followers.complete import reason_of
from celery_unique.header import HEADER, LockHeader
from celery_unique.policy.fields import REPLACING
from celery_unique.stores.base import Acquired, Holder
from celery_unique.stores.record import State

from .results import CallOutcome
from .stored_meta import SUPERSEDED_BY

logger = logging.getLogger("celery_unique")


def mark_superseded(
    app: Any, task_id: str, by: str, options: Mapping[str, Any], key: str | None = None
) -> None:
    """Store REVOKED at once: whoever waits for it need not wait for its message.

    The worker that reaches the message drops it, and sends the event and the signal.
    """
    if options.get("ignore_result"):
        return
    task = options.get("task_type")
    backend = task.backend if task is not None else app.backend
    reason = reason_of("superseded", by)
    try:
        request = _superseded_request(task_id, by, key) if key is not None else None
        backend.mark_as_revoked(task_id, reason, request=request, store_result=True)
    except Exception:
        # The replacement is published: the caller must hear of that, whatever becomes of
        # the old result. The worker stores it again when it reaches the message.
        logger.warning("the end of superseded task %s is not stored yet", task_id, exc_info=True)


def _superseded_request(task_id: str, by: str, key: str) -> Context:
    """As much of a request as tells what is stored beside the result."""
    request = Context({"id": task_id, HEADER: LockHeader(task_id, key).as_message()})
    request.__dict__[SUPERSEDED_BY] = by
    return request


@dataclass(slots=True)
class Conflict:
    """A call and the task that is in its way."""

    task_name: str
    key: str
    holder: Holder
    conceal: bool = False  # do not tell a caller who holds the key
    by_idempotency_key: bool = False  # the call brought the key itself


def ignore(conflict: Conflict) -> CallOutcome:
    """The holder does the work: the call gets the holder's result."""
    if conflict.conceal:
        return reject(conflict)
    return CallOutcome("deduplicated", True, conflict.key, str(conflict.holder.state))


def reject(conflict: Conflict, reason: str | None = None) -> CallOutcome:
    """The caller is told, loudly."""
    raise DuplicateTask(
        conflict.task_name,
        None if conflict.conceal else conflict.holder.task_id,
        None if conflict.conceal else str(conflict.holder.state),
        reason,
        conflict.by_idempotency_key,
        key=conflict.key,
    )


def cannot_replace(conflict: Conflict) -> CallOutcome:
    """The store has replaced what could be replaced: this is what could not."""
    if conflict.conceal:  # one answer for all states, or it would tell the holder's
        return reject(conflict, "what holds it cannot be replaced")
    if conflict.holder.state is State.COMPLETED:  # its idempotency key answers for it
        return ignore(conflict)
    if conflict.holder.state is State.ACTIVE:
        return reject(conflict, "a task that runs cannot be replaced")
    return reject(conflict, "the call brings the id of the task that it would replace")


#: What is left to a call that the store has not admitted.
STRATEGIES: dict[str, Callable[[Conflict], CallOutcome]] = {
    "ignore": ignore,
    "reject": reject,
    "replace": cannot_replace,
    "replace_except_schedule": cannot_replace,
    "rerun": ignore,  # the holder has not started, so it will see what the caller has done
}


def resolve(strategy: str, conflict: Conflict) -> CallOutcome:
    return STRATEGIES[strategy](conflict)


def admitted(key: str, acquired: Acquired, on_conflict: str, parent: str | None) -> CallOutcome:
    """What a call hears whose task was created."""
    if acquired.after:
        # A replacement comes after a task that waits where that was pushed back for long enough.
        waits = on_conflict in REPLACING and acquired.after != parent
        state = State.AVAILABLE if waits else State.ACTIVE
        return CallOutcome("rerun", bool(acquired.replaced), key, str(state))
    return CallOutcome("replaced" if acquired.replaced else "created", False, key)


def joined(key: str, holder: Holder) -> CallOutcome:
    """What a call hears that keeps its own id and shares the holder's outcome."""
    return CallOutcome("joined", True, key, str(holder.state))
