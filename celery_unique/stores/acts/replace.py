"""Tasks that another one stands in for, and what becomes of them."""

from __future__ import annotations

from celery_unique.stores.record import Mark, Record, TaskEntry

from .followers import follow_instead


def in_limbo(record: Record, task: TaskEntry) -> bool:
    """Whether a replacement that is not published yet stands in for the task: it blocks
    nobody and does not start, but it is not gone either."""
    while task.by:
        replacement = record.tasks.get(task.by)
        if replacement is None:
            return False
        if not replacement.released:
            return True
        task = replacement
    return False


def stands_in_for(record: Record, task_id: str) -> list[str]:
    """Every task in limbo under this one, down the chain."""
    found = [task_id]
    for replacement in found:
        found += [i for i, task in record.tasks.items() if task.by == replacement and i != task_id]
    return found[1:]


def finalise(record: Record, task_id: str, mark_until: int, now: int) -> None:
    """The task is published or runs: what it stands in for, down the chain, is over.

    Their messages are still out there, so each leaves a mark for the gate.
    """
    for other_id in stands_in_for(record, task_id):
        other = record.tasks[other_id]
        if not other.running:
            del record.tasks[other_id]
            if other.in_canvas or other.expected:
                record.tasks[task_id].flag("f")
            mark = Mark("superseded", max(other.lease, mark_until), task_id)
            record.put_mark(other_id, mark, now)
            follow_instead(record, other_id, task_id)


def bring_back(record: Record, task_id: str, lease_until: int) -> None:
    """The replacement will not run: what it stood in for is back where it was, or waits for
    the replacement's own."""
    own_replacement = record.tasks[task_id].by
    for other in record.tasks.values():
        if other.by == task_id:
            other.by = own_replacement
            if not own_replacement and other.waiting:
                other.lease = max(other.lease, lease_until)
