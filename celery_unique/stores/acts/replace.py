"""Tasks that another one replaces: in limbo until that is published, then removed or restored."""

from __future__ import annotations

from celery_unique.stores.record import Mark, Record

from . import merge
from .followers import follow_instead


def replaced_by(record: Record, task_id: str) -> list[str]:
    """Every task that this one replaces, down the chain."""
    found = [task_id]
    for replacement in found:
        found += [i for i, task in record.tasks.items() if task.by == replacement and i != task_id]
    return found[1:]


def finalise(record: Record, task_id: str, mark_until: int, now: int) -> None:
    """The task is published or runs: remove what it replaces, down the chain.

    Their messages are still in the broker, so each leaves a mark for the gate.
    """
    for other_id in replaced_by(record, task_id):
        other = record.tasks[other_id]
        if not other.running:
            merge.drop(record, other_id)
            del record.tasks[other_id]
            if other.in_canvas or other.expected:
                record.tasks[task_id].flag("f")
            until = max(other.lease, mark_until)
            mark = Mark("superseded", until, task_id, other.marked_for_good)
            record.put_mark(other_id, mark, now)
            follow_instead(record, other_id, task_id)


def restore_replaced(record: Record, task_id: str, lease_until: int) -> None:
    """The replacement will not run: restore what it replaced, or leave it to the replacement's
    own."""
    own_replacement = record.tasks[task_id].by
    for other in record.tasks.values():
        if other.by == task_id:
            other.by = own_replacement
            if not own_replacement and other.waiting:
                other.lease = max(other.lease, lease_until)
