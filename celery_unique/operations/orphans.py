"""Locks of tasks that wait for nothing: no queue has their message, and no worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from celery_unique.runtime import Runtime

from .queues import Queue, look_into_queues, queue_of_task, unacknowledged_ids
from .selecting import HeldLock
from .workers import DEFAULT_TIMEOUT_S, NotKnown, Workers, ask_workers, held_by_workers

BATCH = 500
#: A message that was published a moment ago may be anywhere.
YOUNGEST_MS = 2000

_WAITING = ("available", "scheduled", "retryable")


def lost_messages(
    runtime: Runtime,
    locks: Iterable[HeldLock],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    workers: Workers | None = None,
) -> Iterator[HeldLock]:
    """Those of the locks whose task waits while its queue is empty and no worker holds it.

    The queue is the one that the task's calls go to; a call that was sent to another one by
    ``queue=`` is taken for lost when that of its task is empty.
    """
    workers = ask_workers(runtime.app, timeout_s) if workers is None else workers
    untold = sorted([*workers.silent, *workers.without])
    if untold:
        raise NotKnown(
            f"Which messages are gone cannot be told, since these workers did not say what they "
            f"hold: {', '.join(untold)}"
        )
    candidates = (lock for lock in locks if may_be_lost(lock))
    while batch := list(islice(candidates, BATCH)):
        yield from _lost(runtime, batch, sorted(workers.told), timeout_s)


def may_be_lost(lock: HeldLock) -> bool:
    """Whether its message should be somewhere."""
    return lock.state in _WAITING and lock.age_ms >= YOUNGEST_MS


def _lost(
    runtime: Runtime, batch: list[HeldLock], workers: list[str], timeout_s: float
) -> Iterator[HeldLock]:
    # In this order: a message goes from its queue to a worker, and its end changes the record.
    queues = {lock.entry.task_name: "" for lock in batch}
    for name in queues:
        queues[name] = queue_of_task(runtime, name)
    seen = look_into_queues(runtime.app, set(queues.values()))
    left = [lock for lock in batch if not seen[queues[lock.entry.task_name]].messages]
    if not left:
        return
    _refuse_unknown_consumers(seen, len(workers))
    unacknowledged = unacknowledged_ids(runtime.app)
    held = held_by_workers(runtime.app, workers, [lock.task_id for lock in left], timeout_s)
    if held is None or unacknowledged is None:
        raise NotKnown("Which messages are gone cannot be told: the workers did not all answer")
    for lock in left:
        if lock.task_id not in held | unacknowledged and _is_unchanged(runtime, lock):
            yield lock


def _refuse_unknown_consumers(queues: Mapping[str, Queue], workers: int) -> None:
    """A worker too busy to answer is not known to be there, and may hold messages."""
    for name, queue in queues.items():
        if queue.consumers > workers:
            raise NotKnown(
                f"Which messages are gone cannot be told: queue {name} has {queue.consumers} "
                f"consumers, and {workers} workers have told what they hold"
            )


def _is_unchanged(runtime: Runtime, lock: HeldLock) -> bool:
    record, _ = runtime.store.read(lock.key)
    return record.tasks.get(lock.task_id) == lock.entry
