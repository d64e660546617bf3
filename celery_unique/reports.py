"""How this library says what happened: one log line and one signal each.

Keys are derived from arguments, so they are logged at DEBUG only.
"""

from __future__ import annotations

import logging
from typing import Any

from . import signals
from .exceptions import StoreUnavailable
from .policy import UniquePolicy
from .stores.base import Holder

logger = logging.getLogger("celery_unique")


def acquired(app: Any, task_name: str, task_id: str, key: str) -> None:
    logger.debug("%s[%s] took its key %s", task_name, task_id, key)
    signals.unique_acquired.send(sender=task_name, task_id=task_id, key=key, app=app)


def conflict(app: Any, task_name: str, holder: Holder, key: str, policy: UniquePolicy) -> None:
    logger.info(
        "%s was not published: task %s (%s) holds its key",
        task_name,
        holder.task_id,
        holder.state,
    )
    signals.unique_conflict.send(
        sender=task_name,
        task_id=holder.task_id,
        state=str(holder.state),
        key=key,
        on_conflict=policy.on_conflict,
        app=app,
    )


def long_wait(task_name: str, holder: Holder, now: int) -> None:
    """A lock whose message was purged would otherwise swallow calls in silence."""
    logger.warning(
        "%s: task %s, which holds the key, has waited for %d minutes. If its message is gone "
        "(a purged queue), free the key with celery -A APP unique release --task-id ID",
        task_name,
        holder.task_id,
        (now - holder.created_at) // 60_000,
    )


def result_goes_to_another(task_name: str, holder_id: str) -> None:
    logger.warning(
        "%s: with rpc:// the result of task %s reaches the caller that published it and no "
        "other. To wait for it here, use another result backend",
        task_name,
        holder_id,
    )


def unlocked(task_name: str, task_id: str, why: str) -> None:
    logger.warning("%s[%s] is published without a lock: %s", task_name, task_id, why)


def released(app: Any, task_name: str, task_id: str, key: str, reason: str) -> None:
    logger.debug("%s[%s] gave its key %s back: %s", task_name, task_id, key, reason)
    signals.unique_released.send(sender=task_name, task_id=task_id, key=key, reason=reason, app=app)


def superseded(app: Any, task_name: str, task_id: str, key: str, by: str) -> None:
    logger.info("%s[%s] is superseded by task %s", task_name, task_id, by)
    signals.unique_superseded.send(sender=task_name, task_id=task_id, key=key, by=by, app=app)


def lost(app: Any, task_name: str, task_id: str, key: str, reason: str) -> None:
    logger.warning("%s[%s]: %s", task_name, task_id, reason)
    signals.unique_lost.send(sender=task_name, task_id=task_id, key=key, reason=reason, app=app)


def store_error(
    app: Any, act: str, error: StoreUnavailable, task_name: str, task_id: str, key: str
) -> None:
    logger.error("the lock store did not answer (%s of task %s): %s", act, task_id, error)
    signals.unique_store_error.send(
        sender=task_name, act=act, exception=error, task_id=task_id, key=key, app=app
    )


def held_back(task_name: str, task_id: str) -> None:
    logger.info(
        "%s[%s] waits: another delivery of it is running, or the task that it comes after",
        task_name,
        task_id,
    )


def dropped(task_name: str, task_id: str, why: str) -> None:
    logger.info("%s[%s] is dropped: %s", task_name, task_id, why)


def left_to_another(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s]: its message belongs to the delivery that has taken it over, and is left to that",
        task_name,
        task_id,
    )


def other_store(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s] has its lock in another store or namespace than this worker uses, or in the "
        "same one by another address. Callers and workers need the same unique_store_url and "
        "unique_namespace, or nobody gives such locks back (said once)",
        task_name,
        task_id,
    )


def ended_for_another(task_name: str, task_id: str) -> None:
    logger.warning(
        "%s[%s]: its key is given back from the worker's main process, since the process that "
        "ran it was gone before the lock store answered",
        task_name,
        task_id,
    )
