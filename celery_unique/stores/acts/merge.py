"""Merged calls: their values wait beside the record for the run of the task that takes them."""

from __future__ import annotations

from collections.abc import Iterable

from celery_unique.stores.base import Acquired, Claim, Start, holder_of
from celery_unique.stores.record import Record, TaskEntry
from celery_unique.stores.record_payloads import KEPT_MS, line_head, line_of

from .followers import attach


def merged_before(record: Record, claim: Claim, now: int) -> Acquired | None:
    """The reply to an attempt that is repeated, where it has merged its values before."""
    head = line_head(claim.task_id)
    for task_id, task in record.tasks.items():
        if task.merges and task_id != claim.task_id and _has(record, task_id, head):
            return Acquired("merged", holder_of(task_id, task, now), now)
    return None


def _has(record: Record, task_id: str, head: str) -> bool:
    text = record.payloads.text(task_id)
    return text.startswith(head) or f"\n{head}" in text


def last_in_line(record: Record, blockers: Iterable[str]) -> str:
    """The task after which a new one would run: the newest that has not ended, and what succeeds
    that. Empty for none."""
    live = [i for i in blockers if not record.tasks[i].terminal]
    if not live:
        return ""
    last = live[-1]
    for _ in live:
        successors = [i for i in live if record.tasks[i].after == last]
        if not successors:
            break
        last = successors[-1]
    return last


def takes(record: Record, task_id: str, claim: Claim) -> bool:
    """Whether the task can run with the values of the call, too.

    Not once it has started: a redelivery and a retry have the payload of the first start. Nor if
    its own values are in its message alone, or it is another task that has the same key.
    """
    task = record.tasks[task_id]
    if not (task.merges and task.unstarted and task.arguments == claim.arguments):
        return False
    if task.task_name != claim.task_name:
        return False
    return record.payloads.size(task_id) + len(claim.merge) <= claim.merge_max_bytes


def merge(record: Record, claim: Claim, holder: str, now: int) -> Acquired:
    """Add the values of the call to those of the holder, and postpone that as the call asks."""
    task = record.tasks[holder]
    task.duplicates += 1
    task.last_duplicate_at = now
    if claim.delay_ms and task.eta > now:
        _postpone(task, claim, now)
    _append(record, holder, claim)
    outcome = Acquired("merged", holder_of(holder, task, now), now)
    if claim.join and holder != claim.task_id:
        attach(record, claim, holder, now)
        outcome.outcome = "joined"
    return outcome


def _postpone(task: TaskEntry, claim: Claim, now: int) -> None:
    eta = now + claim.delay_ms
    if claim.max_wait_ms:
        eta = min(eta, task.created_at + claim.max_wait_ms)
    if eta > task.eta:
        if not task.pending:  # else its lease is the grace of its publish
            task.lease += eta - task.eta
        task.eta = eta


def begin(record: Record, claim: Claim) -> None:
    """A new task: its own values are the first of its payload."""
    record.tasks[claim.task_id].flag("p")
    for task in record.tasks.values():
        if task.after == claim.task_id:  # it waited for an earlier task with this id
            task.after = ""
    if claim.again and _has(record, claim.task_id, line_head(claim.task_id)):
        keep(record, claim.task_id)  # its grace has passed: others were merged into it
        return
    record.payloads.drop(claim.task_id)  # of an earlier task with this id
    _append(record, claim.task_id, claim)


def _append(record: Record, task_id: str, claim: Claim) -> None:
    line = line_of(claim.task_id, claim.merge)
    until = _kept_until(record.tasks[task_id])
    record.payloads.append(task_id, line, len(claim.merge), until)


def _kept_until(task: TaskEntry) -> int:
    return max(task.lease, task.eta) + KEPT_MS


def keep(record: Record, task_id: str) -> None:
    """Its lease has changed."""
    task = record.tasks[task_id]
    if task.merges:
        record.payloads.keep(task_id, _kept_until(task))


def payload_of(record: Record, task_id: str) -> str:
    """What the body is to run with instead of the values in its message; empty: those.

    Also where its own values are the only ones: the message may be a copy, with those of another
    call that was removed again.
    """
    return record.payloads.text(task_id) if record.tasks[task_id].merges else ""


def find_again(record: Record, start: Start) -> None:
    """The record of the task is lost; its payload may not be."""
    if start.merge and record.payloads.text(start.task_id):
        record.tasks[start.task_id].flag("p")


def leave_to_others(record: Record, task_id: str) -> bool:
    """The publish of the task has failed: if calls were merged into it, they publish it, and its
    own values are removed, since its caller gets an error. Returns whether there are such calls."""
    task = record.tasks[task_id]
    if not task.merges or not task.duplicates:
        return False
    record.payloads.remove(task_id, line_head(task_id))
    return True


def drop(record: Record, task_id: str) -> None:
    """The task is settled, or never runs."""
    task = record.tasks[task_id]
    if task.merges:
        task.unflag("p")
        record.payloads.drop(task_id)


def unmerge(record: Record, call_id: str, now: int) -> bool:
    record.purge(now)
    head = line_head(call_id)
    found = [i for i, task in record.tasks.items() if task.merges and task.unstarted]
    return any(record.payloads.remove(i, head) for i in found if i != call_id)


def waits_for_a_run(record: Record, call_id: str, holder: str) -> bool:
    """Whether a call was merged into a task that has lost its message or its worker."""
    return _has(record, holder, line_head(call_id))


def hand_over(record: Record, holder: str, other: str) -> None:
    """Another task runs with the payload of one that has lapsed."""
    if holder != other:
        task = record.tasks[other]
        record.payloads.move(holder, other, _kept_until(task))
    record.tasks[other].flag("p")
