"""The end of a task that another one has replaced before it ran."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery.app.task import Context

from .header import HEADER, LockHeader
from .result_meta import SUPERSEDED_BY

logger = logging.getLogger("celery_unique")


#: How a superseded task's reason begins, in the result backend.
_SUPERSEDED_BY = "superseded by task "


def replacement_in(reason: str) -> str:
    """The task that took the place of one that ended for this reason; empty for none."""
    return reason.removeprefix(_SUPERSEDED_BY) if reason.startswith(_SUPERSEDED_BY) else ""


def reason_of(mark: str, by: str) -> str:
    """Why a message is dropped at the gate, for the result backend and for people."""
    return f"{mark} by task {by}" if by else mark


def end_superseded(
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
