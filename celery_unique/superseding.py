"""The end of a task that another one has replaced before it ran."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("celery_unique")


def reason_of(mark: str, by: str) -> str:
    """Why a message is dropped at the gate, for the result backend and for people."""
    return f"{mark} by task {by}" if by else mark


def end_superseded(app: Any, task_id: str, by: str, options: Mapping[str, Any]) -> None:
    """Store REVOKED at once: whoever waits for it need not wait for its message.

    The worker that reaches the message drops it, and sends the event and the signal.
    """
    if options.get("ignore_result"):
        return
    task = options.get("task_type")
    backend = task.backend if task is not None else app.backend
    reason = reason_of("superseded", by)
    try:
        backend.mark_as_revoked(task_id, reason, request=None, store_result=True)
    except Exception:
        # The replacement is published: the caller must hear of that, whatever becomes of
        # the old result. The worker stores it again when it reaches the message.
        logger.warning("the end of superseded task %s is not stored yet", task_id, exc_info=True)
