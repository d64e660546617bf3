"""The messages that a worker holds, wherever Celery keeps their requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from celery.worker import state as worker_state


def held_requests(worker: Any) -> list[Any]:
    """Every request of a unique message that this worker holds, once: running, reserved,
    scheduled for an ETA, held back at the gate, or waiting for a rate limit."""
    found = {id(request): request for request in _all_places(worker)}.values()
    return [each for each in found if getattr(each, "unique_delivery", None) is not None]


def _all_places(worker: Any) -> Iterator[Any]:
    yield from _copy(worker_state.requests.values())
    yield from _copy(worker_state.reserved_requests)
    # Up to Celery 5.6 a lost connection takes running tasks out of the two above.
    yield from _copy(worker_state.active_requests)
    yield from _copy(getattr(worker_state, "scheduled_requests", ()))
    consumer = getattr(worker, "consumer", None)
    timer = getattr(consumer, "timer", None)
    for entry in _copy(getattr(getattr(timer, "schedule", None), "queue", ())):
        yield from getattr(entry.entry, "args", None) or ()
    for bucket in _copy(getattr(consumer, "task_buckets", {}).values()):
        for item in _copy(getattr(bucket, "contents", ())):
            yield from item or ()


def _copy(collection: Iterable[Any]) -> list[Any]:
    """A copy of what the worker's main thread may be changing right now."""
    while True:
        try:
            return list(collection)
        except RuntimeError:  # changed size during iteration
            continue
