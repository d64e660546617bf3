"""The rule of stale holders: their task has ended, or their message is lost.

A holder that waits by its record is proven stale, and its key may be released, when

- its task has ended by the result backend (see ``ended``); or
- its broker can be inspected, and no queue that may have its message does (see ``queues``); every
  running worker has replied, and none of them holds it; and its record has not changed meanwhile.

Otherwise it is unproven, and reported with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of

from .ended import ended_as
from .lock_view import LockView
from .queues import NO_HURRY, Limits, not_in_queues
from .workers import (
    DEFAULT_TIMEOUT_S,
    Workers,
    held_by_plain_workers,
    held_by_workers,
    query_workers,
)

logger = logging.getLogger("celery_unique")

BATCH = 2000
#: A message that was just published may be on its way.
YOUNGEST_MS = 2000

_WAITING = ("available", "scheduled", "retryable")


@dataclass(frozen=True, slots=True)
class Missing:
    """A lock whose task has ended, or whose message was not found."""

    lock: LockView
    #: Why it may exist anyway; empty: it is proven lost.
    unless: str = ""
    returns_at_ms: int = 0  # where it is known: when it is delivered again
    ended: str = ""  # the state of Celery in which its task has ended

    @property
    def why(self) -> str:
        """Why it is stale, in words."""
        if self.ended:
            return f"its task has ended ({self.ended} in the result backend)"
        return "neither the broker nor a worker has its message"


@dataclass(slots=True)
class Unproven:
    """Why locks are not proven lost, and how many."""

    locks: dict[str, int] = field(default_factory=dict)
    returns_at_ms: dict[str, int] = field(default_factory=dict)  # the last of them

    @property
    def in_all(self) -> int:
        return sum(self.locks.values())

    def proven(self, missing: Iterable[Missing]) -> Iterator[LockView]:
        """The locks whose message is lost; the others are counted here."""
        for each in missing:
            if not each.unless:
                yield each.lock
                continue
            self.locks[each.unless] = self.locks.get(each.unless, 0) + 1
            latest = max(each.returns_at_ms, self.returns_at_ms.get(each.unless, 0))
            self.returns_at_ms[each.unless] = latest

    def as_document(self) -> list[dict[str, Any]]:
        return [
            {
                "reason": reason,
                "locks": locks,
                "returns_at_ms": self.returns_at_ms[reason] or None,
            }
            for reason, locks in self.locks.items()
        ]

    def in_words(self) -> Iterator[tuple[int, str]]:
        for reason, locks in self.locks.items():
            returns_at = self.returns_at_ms[reason]
            moment = moment_of(returns_at) if returns_at else None
            yield (
                locks,
                f"{reason}, at the latest from {moment:%Y-%m-%d %H:%M:%S} UTC on"
                if moment
                else reason,
            )


def missing_messages(
    app_state: AppState,
    locks: Iterable[LockView],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    workers: Workers | None = None,
    limits: Limits = NO_HURRY,
) -> Iterator[Missing]:
    """The locks whose task waits and has ended, or whose message was not found."""
    candidates = (lock for lock in locks if may_be_lost(lock))
    workers = query_workers(app_state.app, timeout_s) if workers is None else workers
    while batch := list(islice(candidates, BATCH)):
        yield from _missing(app_state, batch, workers, timeout_s, limits)


def ended_here(app_state: AppState, lock: LockView) -> str:
    """As ``ended_as``; empty where the result backend is unavailable."""
    try:
        return ended_as(app_state.app, lock)
    except Exception as error:  # noqa: BLE001  (each kind of backend has its own)
        logger.debug("the result backend did not report on task %s: %s", lock.task_id, error)
        return ""


def may_be_lost(lock: LockView) -> bool:
    """Whether its message should exist."""
    return lock.state in _WAITING and lock.age_ms >= YOUNGEST_MS


def _missing(
    app_state: AppState,
    batch: list[LockView],
    workers: Workers,
    timeout_s: float,
    limits: Limits,
) -> Iterator[Missing]:
    # In this order: a message goes from its queue to a worker, and its end changes the record.
    places = not_in_queues(app_state, batch, workers, limits)
    held, silent = held_by_workers(app_state.app, sorted(workers.replies), list(places), timeout_s)
    plain = workers.without
    if plain and all(place.is_complete for place in places.values()):
        of_plain, plain = held_by_plain_workers(app_state.app, plain, list(places), timeout_s)
        held |= of_plain
    silent = sorted({*silent, *workers.silent, *plain})
    unless = f"these workers did not report what they hold: {', '.join(silent)}" if silent else ""
    for lock in batch:
        place = places.get(lock.task_id)
        if place is None or lock.task_id in held:
            continue
        # Only of these: reading a result is a round trip for each.
        ended = ended_here(app_state, lock)
        if ended:
            yield Missing(lock, ended=ended)
        elif place.unless or unless:
            yield Missing(lock, place.unless or unless, place.returns_at_ms)
        elif _is_unchanged(app_state, lock):
            yield Missing(lock)


def _is_unchanged(app_state: AppState, lock: LockView) -> bool:
    record, _ = app_state.store.read(lock.key)
    return record.tasks.get(lock.task_id) == lock.entry
