"""Acts of a caller after acquire, and of an operator: confirm, give_back, help, cancel, release."""

from __future__ import annotations

from typing import Literal

from celery_unique.stores.record import Mark, Record

from . import lanes, merge
from .blocking import in_limbo
from .followers import move, set_due_time, stop_following
from .replace import finalise, restore_replaced


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
    stop_following(record, task_id)  # it was promoted, and its message is published
    set_due_time(record, now)


def give_back(record: Record, task_id: str, mark_ms: int, now: int) -> bool:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is None or not task.unstarted:
        return False
    # Also where a copy is published: it runs with the payload, and not with its own values.
    if merge.leave_to_others(record, task_id) or not task.pending or task.copies:
        return False
    restore_replaced(record, task_id, now + mark_ms)
    merge.drop(record, task_id)
    del record.tasks[task_id]
    # The publish failed, but the message may have arrived: the gate must drop it.
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
        return "again"  # a copy would run under a lock that blocks no call
    if task.in_canvas:
        return "again"  # a copy would run without the callbacks that wait for its id
    task.flag("m")
    if abandoned:  # one copy is enough, unless this caller dies before its publish
        task.held_until = now + claim_ms
    return "go"


def cancel(record: Record, task_id: str, mark_ms: int, now: int) -> Literal["cancelled", "active"]:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is not None:
        alive = task.running and task.delivery_lease > now
        if alive or task.terminal:
            return "active"
        restore_replaced(record, task_id, now + mark_ms)
        merge.drop(record, task_id)
        del record.tasks[task_id]
        # A call that has its turn, and may not be published, is completed by the reaper.
        if not lanes.is_parked(record, task_id):
            stop_following(record, task_id)
    mark = record.mark_of(task_id, now)
    follows = record.following is not None and task_id in record.followers
    if follows:
        move(record, task_id, task_id)  # it follows itself, so that the reaper finds it revoked
    elif mark is not None and mark.kind == "done":
        return "active"  # it has ended: a second message of it is not a revoked task
    until = max(now + mark_ms, mark.until if mark is not None else 0)
    lasting = bool(task and task.marked_for_good) or bool(mark and mark.lasting)
    record.put_mark(task_id, Mark("revoked", until, lasting=lasting), now)
    set_due_time(record, now)
    return "cancelled"


def release(record: Record, task_id: str | None, lease: int, now: int) -> int:
    record.purge(now)
    count = 0
    for candidate in [task_id] if task_id else list(record.tasks):
        task = record.tasks.get(candidate)
        if task is None or task.released or (lease and not (task.waiting and task.lease == lease)):
            continue
        count += 1
        if task.terminal and not task.ending:
            del record.tasks[candidate]
        else:
            task.flag("o")  # it stays: the holder must still be able to finish
    if count:
        set_due_time(record, now)
    return count
