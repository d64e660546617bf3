"""What happened to a lock, as Celery signals. The sender is the task's name.

Receivers run where the thing happened: in the calling process, in the pool's
child or in the worker's main process. They get the facts below and ``**extra``:
accept ``**kwargs``, so that a new fact never breaks a receiver.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.dispatch import Signal

from .exceptions import StoreUnavailable, UnreadableRecord
from .policy.policy import UniquePolicy
from .stores.base import Holder
from .stores.bounded import BoundedDict
from .stores.failover import FailOver

logger = logging.getLogger("celery_unique")


#: A call took its key. ``task_id, key, app``
unique_acquired = Signal(name="unique_acquired")

#: A call found its key held. ``task_id`` (the holder's), ``state, key, on_conflict, waited_s``
#: (how long the holder has waited in the queue; 0 when it is not there), ``app``
unique_conflict = Signal(name="unique_conflict")

#: A key was given back: its task ended or was revoked, or somebody released it by hand.
#: ``task_id, key, reason, app``
unique_released = Signal(name="unique_released")

#: A task was replaced before it ran. ``task_id, key, by, app``
unique_superseded = Signal(name="unique_superseded")

#: A task runs or ends although its lock had lapsed or went to another.
#: ``task_id, key, reason, app``
unique_lost = Signal(name="unique_lost")

#: The store did not answer. ``act, exception, task_id, key, app``
unique_store_error = Signal(name="unique_store_error")


def facts(task_name: str, task_id: str, outcome: str, **more: Any) -> dict[str, Any]:
    """The attributes of a log record."""
    return {"task_name": task_name, "task_id": task_id, "outcome": outcome, **more}


def acquired(app: Any, task_name: str, task_id: str, key: str, outcome: str = "created") -> None:
    logger.debug(
        "%s[%s] took its key %s",
        task_name,
        task_id,
        key,
        extra=facts(task_name, task_id, outcome, key=key),
    )
    unique_acquired.send(sender=task_name, task_id=task_id, key=key, app=app)


def conflict(
    app: Any, task_name: str, holder: Holder, key: str, policy: UniquePolicy, waited_ms: int
) -> None:
    logger.info(
        "%s was not published: task %s (%s) holds its key",
        task_name,
        holder.task_id,
        holder.state,
        extra=facts(
            task_name,
            holder.task_id,
            "conflict",
            holder_state=str(holder.state),
            on_conflict=policy.on_conflict,
        ),
    )
    unique_conflict.send(
        sender=task_name,
        task_id=holder.task_id,
        state=str(holder.state),
        key=key,
        on_conflict=policy.on_conflict,
        waited_s=waited_ms / 1000,
        app=app,
    )


def held_by_itself(task_name: str, holder: Holder) -> None:
    """A call with the id of a task that has not ended: it waits for itself."""
    logger.warning(
        "%s: task %s, which holds the key, has the id of this call. To run it once more, call it "
        "without task_id; if its message is gone, free the key first, with "
        "celery -A APP unique release --task-id ID",
        task_name,
        holder.task_id,
        extra=facts(task_name, holder.task_id, "held_by_itself"),
    )


def joined(task_name: str, task_id: str, holder: Holder) -> None:
    logger.info(
        "%s[%s] gets the outcome of task %s",
        task_name,
        task_id,
        holder.task_id,
        extra=facts(task_name, task_id, "joined", by=holder.task_id),
    )


def follows_replacement(task_name: str, task_id: str, by: str) -> None:
    logger.info(
        "%s[%s] gets the outcome of task %s, which took its place",
        task_name,
        task_id,
        by,
        extra=facts(task_name, task_id, "joined", by=by),
    )


def follower_lost(app: Any, task_name: str, task_id: str, key: str, holder_id: str) -> None:
    """A worker has a copy of its call: it is not lost with what the store knew of it."""
    reason = f"the lock store has lost that it follows task {holder_id}; it is attached again"
    lost(app, task_name, task_id, key, reason)


def promoted(task_name: str, task_id: str, holder_id: str) -> None:
    logger.warning(
        "%s[%s] is published now: task %s, whose outcome it was to get, died or was dropped",
        task_name,
        task_id,
        holder_id,
        extra=facts(task_name, task_id, "promoted", by=holder_id),
    )


def long_wait(task_name: str, holder: Holder, waited_ms: int) -> None:
    """A lock whose message was purged would otherwise swallow calls in silence."""
    logger.warning(
        "%s: task %s, which holds the key, has waited for %d minutes. If its message is gone "
        "(a purged queue), free the key with celery -A APP unique release --task-id ID",
        task_name,
        holder.task_id,
        waited_ms // 60_000,
        extra=facts(task_name, holder.task_id, "long_wait"),
    )


def result_goes_to_another(task_name: str, holder_id: str) -> None:
    logger.warning(
        "%s: with rpc:// the result of task %s reaches the caller that published it and no "
        "other. To wait for it here, use another result backend",
        task_name,
        holder_id,
        extra=facts(task_name, holder_id, "result_elsewhere"),
    )


def unlocked(task_name: str, task_id: str, why: str) -> None:
    logger.warning(
        "%s[%s] is published without a lock: %s",
        task_name,
        task_id,
        why,
        extra=facts(task_name, task_id, "bypassed", reason=why),
    )


def unlocked_run(task_name: str, task_id: str, why: str) -> None:
    """As ``unlocked``, of an eager call."""
    logger.warning(
        "%s[%s] runs without a lock: %s",
        task_name,
        task_id,
        why,
        extra=facts(task_name, task_id, "bypassed", reason=why),
    )


def started(task_name: str, task_id: str, key: str) -> None:
    logger.debug(
        "%s[%s] starts and holds its key %s",
        task_name,
        task_id,
        key,
        extra=facts(task_name, task_id, "started", key=key),
    )


def released(app: Any, task_name: str, task_id: str, key: str, reason: str) -> None:
    logger.debug(
        "%s[%s] gave its key %s back: %s",
        task_name,
        task_id,
        key,
        reason,
        extra=facts(task_name, task_id, "released", key=key, reason=reason),
    )
    unique_released.send(sender=task_name, task_id=task_id, key=key, reason=reason, app=app)


def superseded(app: Any, task_name: str, task_id: str, key: str, by: str) -> None:
    logger.info(
        "%s[%s] is superseded by task %s",
        task_name,
        task_id,
        by,
        extra=facts(task_name, task_id, "superseded", by=by),
    )
    unique_superseded.send(sender=task_name, task_id=task_id, key=key, by=by, app=app)


def lost(app: Any, task_name: str, task_id: str, key: str, reason: str) -> None:
    logger.warning(
        "%s[%s]: %s",
        task_name,
        task_id,
        reason,
        extra=facts(task_name, task_id, "lost", reason=reason),
    )
    unique_lost.send(sender=task_name, task_id=task_id, key=key, reason=reason, app=app)


def unreadable_header(
    app: Any, task_name: str, task_id: str, wrong: str, *, runs: bool = True
) -> None:
    """As ``lost``: its caller may have taken a lock, and nothing here renews or releases it."""
    reason = f"its header celery_unique cannot be read: {wrong}"
    logger.warning(
        "%s[%s]: its header celery_unique cannot be read: %s. %s. Its sender is a newer release of "
        "celery-unique-tasks (upgrade this worker) or another program that sets this header (let "
        "it send none). A key that it holds is free when its lease ends, or with "
        "celery -A APP unique release --task-id ID",
        task_name,
        task_id,
        wrong,
        "The task runs without a lock" if runs else "The message was dropped",
        extra=facts(task_name, task_id, "unreadable_header", reason=reason),
    )
    unique_lost.send(sender=task_name, task_id=task_id, key="", reason=reason, app=app)


#: Keys whose records cannot be read, as far as this process has reported them.
_unreadable: BoundedDict[str | None, None] = BoundedDict(1000)


def _unreadable_record(act: str, error: UnreadableRecord, task_name: str, task_id: str) -> None:
    """Logged once for each key: every act on it fails, and a renewal comes every few seconds."""
    if error.key in _unreadable:
        return
    _unreadable.remember(error.key, None)
    logger.error(
        "%s[%s] has no lock (%s): %s",
        task_name,
        task_id,
        act,
        error,
        extra=facts(task_name, task_id, "unreadable_record", act=act),
    )


def store_error(
    app: Any, act: str, error: StoreUnavailable, task_name: str, task_id: str, key: str
) -> None:
    if isinstance(error, UnreadableRecord):
        _unreadable_record(act, error, task_name, task_id)
        unique_store_error.send(
            sender=task_name, act=act, exception=error, task_id=task_id, key=key, app=app
        )
        return
    logger.error(
        "the lock store did not answer (%s of task %s): %s",
        act,
        task_id,
        error,
        extra=facts(task_name, task_id, "store_error", act=act),
    )
    unique_store_error.send(
        sender=task_name, act=act, exception=error, task_id=task_id, key=key, app=app
    )


def failed_over(app: Any, failover: FailOver) -> None:
    """Not of any one task: the signal's sender, task id and key are empty."""
    logger.warning("The lock store failed over: %s", failover)
    error = StoreUnavailable(str(failover), store=failover.after)
    unique_store_error.send(
        sender="", act="fail-over", exception=error, task_id="", key="", app=app
    )


def held_back(task_name: str, task_id: str) -> None:
    logger.info(
        "%s[%s] waits: another delivery of it is running, or the task that it comes after",
        task_name,
        task_id,
        extra=facts(task_name, task_id, "held_back"),
    )


def dropped(task_name: str, task_id: str, why: str) -> None:
    logger.info(
        "%s[%s] is dropped: %s",
        task_name,
        task_id,
        why,
        extra=facts(task_name, task_id, "dropped", reason=why),
    )


def left_to_another(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s]: its message belongs to the delivery that has taken it over, and is left to that",
        task_name,
        task_id,
        extra=facts(task_name, task_id, "taken_over"),
    )


def published_again(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s]: the worker that had its message is gone; it is published again under the same id",
        task_name,
        task_id,
        extra=facts(task_name, task_id, "published_again"),
    )


def other_store(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s] has its lock in another store or namespace than this worker uses: it is not in "
        "this one. Callers and workers need the same unique_store_url and unique_namespace, or "
        "such locks are never released (logged once). If both do use the same store, by two "
        "addresses, only this lock had lapsed",
        task_name,
        task_id,
        extra=facts(task_name, task_id, "other_store"),
    )


def ended_for_another(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s]: its key is given back from the worker's main process, since the process that "
        "ran it was gone before the lock store answered",
        task_name,
        task_id,
        extra=facts(task_name, task_id, "ended_for_another"),
    )
