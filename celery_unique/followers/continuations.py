"""Publishes that Celery makes while it finishes a task: chain links, callbacks, chords.

An error raised there would turn the finished task into a FAILURE, so a link that
cannot be published fails under its own id instead, and its error callbacks fire.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from celery.app.task import Context
from celery.utils import uuid
from celery.utils.functional import maybe_list

from celery_unique.exceptions import CeleryUniqueError

logger = logging.getLogger("celery_unique")


#: On a request while its body runs: True. False when it has ended: what the request publishes
#: then continues it.
IN_BODY = "unique_in_body"

#: Celery's own tasks whose whole body is to publish the body of a chord.
PUBLISH_FOR_OTHERS = ("celery.chord_unlock",)

_this_thread = threading.local()


class finishing:  # noqa: N801  used as a function is, in a with statement
    """The worker's main process ends a task: its callbacks are published from here.

    The thread refers to it weakly: should a signal come before ``__exit__`` has reset that, the
    state ends with the block anyway.
    """

    def __enter__(self) -> None:
        self._before = getattr(_this_thread, "finishing", None)
        _this_thread.finishing = weakref.ref(self)

    def __exit__(self, *_: object) -> None:
        _this_thread.finishing = self._before


def continues(request: Any) -> bool:
    """Whether a publish made now continues a task that has ended."""
    if request is not None and (
        request.__dict__.get(IN_BODY) is False or request.task in PUBLISH_FOR_OTHERS
    ):
        return True
    finishing_now = getattr(_this_thread, "finishing", None)
    return finishing_now is not None and finishing_now() is not None


def fail_link(app: Any, name: str, options: Mapping[str, Any], error: CeleryUniqueError) -> Any:
    """End the link under its own id with the error, and return its result."""
    task_id = options.get("task_id") or uuid()
    logger.error("%s[%s] could not be published and fails: %s", name, task_id, error)
    request = Context(
        id=task_id,
        task=name,
        errbacks=maybe_list(options.get("link_error")),
        group=options.get("group_id"),
        group_index=options.get("group_index"),
        chord=options.get("chord"),
        chain=options.get("chain"),
        root_id=options.get("root_id"),
        parent_id=options.get("parent_id"),
        reply_to=options.get("reply_to") or app.thread_oid,
        correlation_id=task_id,
        delivery_info={},
    )
    app.backend.mark_as_failure(
        task_id, error, request=request, store_result=not options.get("ignore_result")
    )
    make = options.get("result_cls") or app.AsyncResult
    return make(task_id)
