"""Finds locks whose message is lost.

A message is proven lost, and its key may be released, when all of this holds:

- its broker can be inspected, and no queue that may have it does (see ``queues``);
- every running worker has replied, and none of them holds it;
- its record has not changed meanwhile.

Otherwise it is unproven, and reported with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of

from .queues import not_in_queues
from .select import LockView
from .workers import DEFAULT_TIMEOUT_S, Workers, held_by_workers, query_workers

BATCH = 2000
#: A message that was just published may be on its way.
YOUNGEST_MS = 2000

_WAITING = ("available", "scheduled", "retryable")


@dataclass(frozen=True, slots=True)
class Missing:
    """A lock whose message was not found."""

    lock: LockView
    #: Why it may exist anyway; empty: it is proven lost.
    unless: str = ""
    returns_at_ms: int = 0  # where it is known: when it is delivered again


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
) -> Iterator[Missing]:
    """The locks whose task waits and whose message was not found."""
    workers = query_workers(app_state.app, timeout_s) if workers is None else workers
    candidates = (lock for lock in locks if may_be_lost(lock))
    while batch := list(islice(candidates, BATCH)):
        yield from _missing(app_state, batch, workers, timeout_s)


def may_be_lost(lock: LockView) -> bool:
    """Whether its message should exist."""
    return lock.state in _WAITING and lock.age_ms >= YOUNGEST_MS


def _missing(
    app_state: AppState, batch: list[LockView], workers: Workers, timeout_s: float
) -> Iterator[Missing]:
    # In this order: a message goes from its queue to a worker, and its end changes the record.
    places = not_in_queues(app_state, batch, workers)
    held, silent = held_by_workers(app_state.app, sorted(workers.replies), list(places), timeout_s)
    silent = sorted({*silent, *workers.silent, *workers.without})
    unless = f"these workers did not report what they hold: {', '.join(silent)}" if silent else ""
    for lock in batch:
        place = places.get(lock.task_id)
        if place is None or lock.task_id in held:
            continue
        if place.unless or unless:
            yield Missing(lock, place.unless or unless, place.returns_at_ms)
        elif _is_unchanged(app_state, lock):
            yield Missing(lock)


def _is_unchanged(app_state: AppState, lock: LockView) -> bool:
    record, _ = app_state.store.read(lock.key)
    return record.tasks.get(lock.task_id) == lock.entry
