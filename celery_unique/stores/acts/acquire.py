"""acquire: whether a call is admitted, what it replaces, and what blocks it."""

from __future__ import annotations

from typing import Literal

from celery_unique.stores.base import Acquired, Claim, holder_of
from celery_unique.stores.record import Record, TaskEntry

from . import lanes, merge
from .blocking import blockers
from .followers import attach, attached_to, set_due_time, stop_following
from .replace import replaced_by

REPLACING = lanes.REPLACING


def acquire(record: Record, claim: Claim, now: int) -> Acquired:
    record.purge(now)
    if claim.on_conflict == "queue":
        return _admit_or_park(record, claim, now)
    joined_to = attached_to(record, claim.task_id, now) if claim.join else ""
    if joined_to:
        return Acquired("joined", holder_of(joined_to, record.tasks[joined_to], now), now)
    if claim.again and _readmit(record, claim, now):
        return _created(record, claim, now)
    if claim.again and claim.merge and (reply := merge.merged_before(record, claim, now)):
        return reply
    own = record.tasks.get(claim.task_id)
    if own is not None and not own.terminal:
        # Two messages of one id would share one record and could not be distinguished.
        return _merge_or_conflict(record, claim, claim.task_id, now)
    found = blockers(record, claim.states, claim.window_ms, now)
    kept = _kept_from(record, claim, found)
    if kept:
        return _conflict(record, claim, kept, now)
    if claim.merge:
        last = merge.last_in_line(record, found) if len(found) >= claim.limit else ""
        if last and merge.takes(record, last, claim):
            return merge.merge(record, claim, last, now)
        return _create_replacing(record, claim, [], last, now)
    active = [i for i in found if record.tasks[i].running]
    waiting = [i for i in found if not record.tasks[i].running and not record.tasks[i].terminal]
    if claim.limit > 1:
        found, active, waiting = lanes.beyond_limit(record, claim, found, active, waiting)
    after = _predecessor(record, claim, active, waiting, now)
    if after or not found or (claim.on_conflict in REPLACING and not active):
        return _create_replacing(record, claim, [i for i in waiting if i != after], after, now)
    return _conflict(record, claim, (active or found)[-1], now)


def _admit_or_park(record: Record, claim: Claim, now: int) -> Acquired:
    """With ``queue``: create the task if it is within its limit and no other call waits."""
    if lanes.is_parked(record, claim.task_id):
        return lanes.queued(record, claim, now)
    if claim.again and _readmit(record, claim, now):
        return _created(record, claim, now)
    own = record.tasks.get(claim.task_id)
    if own is not None and not own.terminal:
        return _conflict(record, claim, claim.task_id, now)
    found = blockers(record, claim.states, claim.window_ms, now)
    if len(found) < claim.limit and not lanes.waits(record):
        return _create_replacing(record, claim, [], "", now)
    refused = lanes.full(record, claim, found, now)
    if refused is not None:
        return refused
    stop_following(record, claim.task_id)
    acquired = lanes.park(record, claim, found, now)
    set_due_time(record, now)
    return acquired


def _merge_or_conflict(record: Record, claim: Claim, holder: str, now: int) -> Acquired:
    if claim.merge and merge.takes(record, holder, claim):
        return merge.merge(record, claim, holder, now)
    return _conflict(record, claim, holder, now)


def _predecessor(
    record: Record, claim: Claim, active: list[str], waiting: list[str], now: int
) -> str:
    """The task that the new one comes after; empty for none."""
    if claim.parent in active:
        return claim.parent
    if active:
        return active[-1] if claim.on_conflict == "rerun" else ""
    if claim.on_conflict in REPLACING and claim.max_wait_ms:
        # Postponed for max_wait: otherwise calls could replace it forever in a slow queue.
        return next((i for i in waiting if _is_overdue(record.tasks[i], claim, now)), "")
    return ""


def _is_overdue(task: TaskEntry, claim: Claim, now: int) -> bool:
    due = task.unstarted and task.eta <= now
    return due and (task.since or task.created_at) + claim.max_wait_ms <= now


def _conflict(record: Record, claim: Claim, holder: str, now: int) -> Acquired:
    task = record.tasks[holder]
    task.duplicates += 1
    task.last_duplicate_at = now
    outcome = _outcome(claim, holder, task)
    if outcome == "joined":
        attach(record, claim, holder, now)
    return Acquired(outcome, holder_of(holder, task, now), now)


def _outcome(
    claim: Claim, holder: str, task: TaskEntry
) -> Literal["rejected", "duplicate", "joined", "ended"]:
    if claim.on_conflict not in ("ignore", "rerun", "queue"):
        return "rejected"
    # Other work behind the same idempotency key has no result for this call.
    if not claim.join or holder == claim.task_id or task.arguments != claim.arguments:
        return "duplicate"
    return "ended" if task.terminal and not task.ending else "joined"


def _readmit(record: Record, claim: Claim, now: int) -> bool:
    """Renew the grace of an attempt that was admitted before; False if it was not."""
    own = record.tasks.get(claim.task_id)
    if own is None:
        # It has finished, since a copy ran, or it was revoked or superseded. The mark must
        # stay, or the message of this attempt would run it once more.
        mark = record.mark_of(claim.task_id, now)
        return mark is not None and mark.kind != "withdrawn"
    if own.pending:
        own.lease = max(own.lease, now + claim.grace_ms)
    return True


def _created(record: Record, claim: Claim, now: int) -> Acquired:
    own = record.tasks.get(claim.task_id)
    replaced = tuple(sorted(replaced_by(record, claim.task_id)))
    followers = tuple(i for i in replaced if record.tasks[i].in_canvas)
    after, eta = (own.after, own.eta) if own is not None else ("", 0)
    return Acquired("created", None, now, replaced, after, eta, followers)


def _kept_from(record: Record, claim: Claim, found: list[str]) -> str:
    """Behind an idempotency key: the task that nothing may replace or follow, since it is other
    work, or the same work and done."""
    for task_id in reversed(found):
        task = record.tasks[task_id]
        if task.arguments != claim.arguments or (claim.arguments and task.terminal):
            return task_id
    return ""


def _create_replacing(
    record: Record, claim: Claim, waiting: list[str], after: str, now: int
) -> Acquired:
    """Create the task; the waiting ones are in limbo until it is published."""
    task = _create(record, claim, now)
    task.after = after
    if claim.merge:
        merge.begin(record, claim)
    replaced = [record.tasks[i] for i in waiting]
    for other in replaced:
        other.by = claim.task_id
    if replaced:
        task.since = min(other.since or other.created_at for other in replaced)
        if claim.on_conflict == "replace_except_schedule":
            task.eta = _kept_schedule(replaced, now) or task.eta
        if claim.max_wait_ms and task.eta > task.since + claim.max_wait_ms:
            latest = task.since + claim.max_wait_ms
            task.eta = latest if latest > now else 0
    return _created(record, claim, now)


def _kept_schedule(replaced: list[TaskEntry], now: int) -> int:
    """The ETA of the newest that is still scheduled; 0 for none."""
    return next((task.eta for task in reversed(replaced) if task.eta > now), 0)


def _create(record: Record, claim: Claim, now: int) -> TaskEntry:
    kept_ms = claim.keep_ms or claim.window_ms
    task = TaskEntry(
        state="p",
        created_at=now,
        lease=now + claim.grace_ms,
        task_name=claim.task_name,
        window_ends=now + kept_ms if kept_ms else 0,
        eta=now + claim.delay_ms if claim.delay_ms else 0,
        keep=claim.keep,
        arguments=claim.arguments,
    )
    if claim.canvas:
        task.flag("c")
    # A mark would drop the new message at the gate, and an older message of this id may still
    # arrive: drop the mark, record that there may be two.
    was_known = record.drop_mark(claim.task_id, now) or record.tasks.pop(claim.task_id, None)
    if was_known:
        task.flag("m")
    record.tasks[claim.task_id] = task
    stop_following(record, claim.task_id)
    set_due_time(record, now)
    return task
