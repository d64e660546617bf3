"""Reports every operation of a lock store that waits for a reply, for metrics and spans.

The operations of the store object are wrapped: another store, and an app without such an
integration, have no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery_unique.stores.base import LockStore

#: An operation, when it began (``time.time()``), how many seconds it took, and its error.
Report = Callable[[str, float, float, BaseException | None], None]

#: The acts of a store that wait for its reply.
TIMED_ACTS = (
    *("acquire", "acquire_many", "give_back", "help", "cancel", "release"),
    *("start", "renew", "finish", "read"),
)
#: Acts of some stores, each with the act that it is reported as.
OTHER_FORMS = {"probe": "acquire", "withdraw": "give_back", "finish_with_result": "finish"}
#: Acts that some stores can run in two steps, which are reported as one.
TWO_STEP_ACTS = {
    "begin_acquire": "acquire",
    "begin_acquire_many": "acquire_many",
    "begin_publish": "acquire",
}


def watch_acts(store: LockStore, report: Report) -> None:
    """Report the acts of this store object from now on."""
    watched: Any = store
    forms = {act: act for act in TIMED_ACTS} | OTHER_FORMS
    for wrap, acts in ((_in_one_step, forms), (_in_two_steps, TWO_STEP_ACTS)):
        for name, act in acts.items():
            run = getattr(watched, name, None)
            if run is not None:
                setattr(watched, name, wrap(act, run, report))


def _in_one_step(act: str, run: Callable[..., Any], report: Report) -> Callable[..., Any]:
    def watched(*args: Any, **options: Any) -> Any:
        at, began = time.time(), time.perf_counter()
        try:
            reply = run(*args, **options)
        except BaseException as error:
            report(act, at, time.perf_counter() - began, error)
            raise
        report(act, at, time.perf_counter() - began, None)
        return reply

    return watched


def _in_two_steps(act: str, begin: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """Leave out the time between sending the request and waiting for the reply."""

    def watched(*args: Any) -> Any:
        at, began = time.time(), time.perf_counter()
        try:
            wait = begin(*args)
        except BaseException as error:
            report(act, at, time.perf_counter() - began, error)
            raise
        sending = time.perf_counter() - began
        return _in_one_step(
            act, wait, lambda _, __, waiting, error: report(act, at, sending + waiting, error)
        )

    return watched
