"""What a caller does after it was admitted, and what lets go of a task from outside."""

from __future__ import annotations

from typing import Literal

from celery_unique.stores.record import Mark, Record

from .followers import move, set_due_time, stop_following
from .replace import bring_back, finalise, in_limbo


def confirm(record: Record, task_id: str, lease_ms: int, now: int) -> None:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is not None and task.pending:
        _publish(record, task_id, lease_ms, now)


def _publish(record: Record, task_id: str, lease_ms: int, now: int) -> None:
    task = record.tasks[task_id]
    task.state = "w"
    task.lease = max(now, task.eta) + lease_ms
    finalise(record, task_id, now + lease_ms, now)
    stop_following(record, task_id)  # it was promoted: its message is out
    set_due_time(record, now)


def give_back(record: Record, task_id: str, mark_ms: int, now: int) -> bool:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is None or not task.pending or task.copies:
        return False
    bring_back(record, task_id, now + mark_ms)
    del record.tasks[task_id]
    # The publish raised, yet it may have landed: the gate must drop that message.
    record.put_mark(task_id, Mark("withdrawn", now + mark_ms), now)
    set_due_time(record, now)
    return True


def help_holder(
    record: Record, task_id: str, claim_ms: int, now: int
) -> Literal["go", "again", "published"]:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is None:
        mark = record.mark_of(task_id, now)
        return "published" if mark is not None and mark.kind == "done" else "again"
    abandoned = task.is_abandoned(now)
    if not task.pending and not abandoned:
        return "published"
    if task.released or in_limbo(record, task):
        return "again"  # a copy would run under a lock that blocks nobody
    if task.in_canvas:
        return "again"  # a copy would run without the callbacks that wait for its id
    task.flag("m")
    if abandoned:  # one copy is enough, unless this caller dies before it has published it
        task.held_until = now + claim_ms
    return "go"


def cancel(record: Record, task_id: str, mark_ms: int, now: int) -> Literal["cancelled", "active"]:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is not None:
        alive = task.running and task.delivery_lease > now
        if alive or task.terminal:
            return "active"
        bring_back(record, task_id, now + mark_ms)
        del record.tasks[task_id]
        stop_following(record, task_id)
    mark = record.mark_of(task_id, now)
    follows = record.following is not None and task_id in record.followers
    if follows:
        move(record, task_id, task_id)  # nobody's follower: whoever looks finds it revoked
    elif mark is not None and mark.kind == "done":
        return "active"  # it has ended: a second message of it is no revoked task
    until = max(now + mark_ms, mark.until if mark is not None else 0)
    record.put_mark(task_id, Mark("revoked", until), now)
    set_due_time(record, now)
    return "cancelled"


def release(record: Record, task_id: str | None, now: int) -> int:
    record.purge(now)
    count = 0
    for candidate in [task_id] if task_id else list(record.tasks):
        task = record.tasks.get(candidate)
        if task is None or task.released:
            continue
        count += 1
        if task.terminal and not task.ending:
            del record.tasks[candidate]
        else:
            task.flag("o")  # it stays: the holder must still be able to finish
    if count:
        set_due_time(record, now)
    return count
