"""Which tasks of a key block a call."""

from __future__ import annotations

from celery_unique.stores.record import Record, TaskEntry


def blockers(record: Record, states: str, window_ms: int, now: int) -> list[str]:
    """Every task that blocks a call with these states and this window, the newest last."""
    found = [
        task_id
        for task_id, task in record.tasks.items()
        if _blocks(task, states, window_ms, now) and not in_limbo(record, task)
    ]
    return sorted(found, key=lambda task_id: record.tasks[task_id].created_at)


def _blocks(task: TaskEntry, states: str, window_ms: int, now: int) -> bool:
    if task.released:
        return False
    if window_ms and task.created_at + window_ms <= now:
        return False
    return any(letter in states for letter in task.counts_as(now))


def in_limbo(record: Record, task: TaskEntry) -> bool:
    """Whether a replacement of the task exists that is not published yet: it neither blocks a
    call nor starts, but it is not gone either."""
    while task.by:
        replacement = record.tasks.get(task.by)
        if replacement is None:
            return False
        if not replacement.released:
            return True
        task = replacement
    return False
