"""Acts of a worker: start, renew, retry, finish, settle, forget."""

from __future__ import annotations

from dataclasses import replace

from celery_unique.stores.base import Finish, Finished, Held, Start, Started
from celery_unique.stores.record import LETTER_OF, Mark, Record, State, TaskEntry, is_kept

from . import lanes, merge
from .blocking import in_limbo
from .followers import (
    follows_itself,
    is_followed,
    number_of_followers,
    set_due_time,
    stop_following,
)
from .replace import finalise, restore_replaced


def start(record: Record, start: Start, now_us: int) -> Started:
    now = now_us // 1000
    record.purge(now)
    mark = record.mark_of(start.task_id, now)
    if mark is not None:
        if mark.kind == "done":
            return Started("done")
        return Started("superseded", mark=mark.kind, by=mark.by)
    task = record.tasks.get(start.task_id)
    if task is not None:
        if task.terminal and not task.ending and not task.rejected:
            return Started("done")
        if task.delivery == start.delivery:
            if task.ending:
                return Started("done")
            payload = merge.payload_of(record, start.task_id)
            return Started("run", task.token, payload=payload)
        if task.delivery and task.delivery_lease > now:
            task.flag("m")
            return Started("wait")
        if in_limbo(record, task) or _predecessor_lives(record, task):
            return Started("wait")
        if task.merges and task.unstarted and task.eta > now:
            return Started("wait", wait_ms=task.eta - now)  # calls have postponed it
    lost = task is None
    if task is None:
        task = _from_header(start, now)
        record.tasks[start.task_id] = task
        merge.find_again(record, start)
    elif task.delivery:
        task.flag("m")  # taken over: the first delivery's message may be redelivered
    record.token = max(record.token + 1, now_us)
    task.state = "r"
    task.unflag("e")
    task.unflag("j")
    task.by = task.after = ""
    task.held_until = 0
    task.delivery = start.delivery
    task.delivery_lease = now + start.run_lease_ms
    # A start that timed out may arrive after the task's end: a record created here stays only
    # if it is renewed.
    task.lease = now + (start.run_lease_ms if lost else start.lease_ms)
    task.token = record.token
    finalise(record, start.task_id, now + start.mark_ms, now)
    stop_following(record, start.task_id)  # it runs itself
    set_due_time(record, now)
    merge.keep(record, start.task_id)
    return Started("run", task.token, lost, payload=merge.payload_of(record, start.task_id))


def _predecessor_lives(record: Record, task: TaskEntry) -> bool:
    predecessor = record.tasks.get(task.after) if task.after else None
    return predecessor is not None and not predecessor.terminal and not predecessor.released


def _from_header(start: Start, now: int) -> TaskEntry:
    """A task whose record lapsed or was lost is never dropped: it was admitted before."""
    created_at = start.created_at or now
    return TaskEntry(
        state="r",
        created_at=created_at,
        lease=0,
        task_name=start.task_name,
        window_ends=created_at + start.window_ms if start.window_ms else 0,
        keep=start.keep,
        arguments=start.arguments,
    )


def renew(record: Record, held: Held, now: int) -> int:
    record.purge(now)
    task = record.tasks.get(held.task_id)
    if held.delivery:
        if task is None or task.delivery != held.delivery:
            return 0
        if task.terminal and not task.ending:
            return 0
        task.lease = max(task.lease, now + held.lease_ms)
        task.delivery_lease = max(task.delivery_lease, now + held.run_lease_ms)
        if held.copies:
            task.flag("m")
        _keep_waiting(record, now)
        merge.keep(record, held.task_id)
        return 1 + number_of_followers(record, held.task_id)
    mark = record.mark_of(held.task_id, now)
    if mark is not None:  # also beside a kept task: this message must still find it
        until = max(mark.until, now + held.lease_ms)
        record.put_mark(held.task_id, replace(mark, until=until), now)
    has_started = task is not None and task.delivery and task.delivery == held.waits_as
    if task is not None and not task.terminal and not has_started:
        pending = task.pending
        task.lease = max(task.lease, max(now, task.eta) + held.lease_ms)
        if held.copies:
            task.flag("m")
        merge.keep(record, held.task_id)
        if held.returned:
            task.held_until = 0
        if held.held_ms and not task.running:
            task.held_until = max(task.held_until, now + held.held_ms)
        if pending:
            task.state = "w"  # a received message has been published
            finalise(record, held.task_id, now + held.lease_ms, now)
            stop_following(record, held.task_id)
            set_due_time(record, now)
        _keep_waiting(record, now)
    if task is None and mark is None:
        return 0
    return 1 + number_of_followers(record, held.task_id)


def _keep_waiting(record: Record, now: int) -> None:
    """Parked calls wait for a longer lease: no worker needs to look at them before that, so that
    waiting costs no commands."""
    if record.following is not None and record.following.lane is not None:
        set_due_time(record, now)


def retry(
    record: Record, task_id: str, delivery: str, lease_ms: int, copies: bool, now: int
) -> None:
    record.purge(now)
    task = record.tasks.get(task_id)
    if task is None or not task.running or task.delivery != delivery:
        return
    task.state = "t"
    task.held_until = 0  # the message of the retry is in the broker
    task.delivery = ""
    task.delivery_lease = 0
    task.lease = now + lease_ms
    if copies:
        task.flag("m")
    merge.keep(record, task_id)
    set_due_time(record, now)


def finish(record: Record, finish: Finish, now: int) -> Finished:
    record.purge(now)
    task = record.tasks.get(finish.task_id)
    if task is None or not _may_finish(task, finish):
        if finish.again and (task is None or _is_kept_end(task, finish)):
            return Finished("ended", called=lanes.unconfirmed(record))
        return Finished("not_yours")
    followed = task.expected or is_followed(record, finish.task_id)
    if task.ending:  # a hard time limit reports twice
        called = lanes.unconfirmed(record) if finish.again else ()
        return Finished("ended", True, task.duplicates, followed, called)
    if task.pending:
        _end_limbo(record, finish, now)
        followed = task.expected or is_followed(record, finish.task_id)
    stop_following(record, finish.task_id)
    if finish.settle_later or task.copies or followed:
        # Callers see the final state from here on, but a redelivery before the result is stored
        # must still find the record.
        task.state = LETTER_OF[finish.state]
        task.delivery = finish.delivery
        task.flag("e")
        if is_kept(finish.state, task.keep):  # even if no worker lives to settle it
            task.lease = max(task.lease, _kept_until(task, finish, now))
        if followed:  # no other worker completes them while this delivery is believed alive
            task.delivery_lease = max(task.delivery_lease, now + finish.run_lease_ms)
        called = lanes.call(record, now)
        set_due_time(record, now)
        return Finished("ended", True, task.duplicates, followed, called)
    duplicates = task.duplicates
    _conclude(record, finish, now)
    called = lanes.call(record, now)
    set_due_time(record, now)
    return Finished("ended", False, duplicates, called=called)


def _end_limbo(record: Record, finish: Finish, now: int) -> None:
    """The task's publish was never confirmed: it has replaced others if it ran, else they are
    restored."""
    if finish.state is State.CANCELLED:
        restore_replaced(record, finish.task_id, now + finish.mark_ms)
    else:
        finalise(record, finish.task_id, now + finish.mark_ms, now)


def _may_finish(task: TaskEntry, finish: Finish) -> bool:
    if not task.delivery:  # revoked, expired, or started while the store was unavailable
        return not task.terminal and finish.token in (0, task.token)
    return task.delivery == finish.delivery and (task.running or task.ending)


def _is_kept_end(task: TaskEntry, finish: Finish) -> bool:
    return task.terminal and task.delivery in ("", finish.delivery)


def settle(record: Record, finish: Finish, mark_done: bool, now: int) -> None:
    record.purge(now)
    task = record.tasks.get(finish.task_id)
    if task is None or not task.ending or task.delivery != finish.delivery:
        return
    if (mark_done or task.copies) and not finish.rejected:
        record.put_mark(finish.task_id, Mark("done", now + finish.mark_ms), now)
    _conclude(record, finish, now)
    set_due_time(record, now)


def _conclude(record: Record, finish: Finish, now: int) -> None:
    """Remove the task, or keep it in its final state as its policy asks."""
    task = record.tasks[finish.task_id]
    merge.drop(record, finish.task_id)
    letter = LETTER_OF[finish.state]
    keep_until = _kept_until(task, finish, now)
    if letter not in task.keep or keep_until <= now:
        del record.tasks[finish.task_id]
        return
    task.state = letter
    task.lease = keep_until
    task.delivery_lease = 0
    task.unflag("e")
    if finish.rejected:
        task.flag("j")


def _kept_until(task: TaskEntry, finish: Finish, now: int) -> int:
    return task.window_ends or now + finish.retention_ms


def forget(record: Record, task_id: str, now: int) -> None:
    record.purge(now)
    mark = record.mark_of(task_id, now)
    if mark is None or mark.lasting:
        return
    # A call that had its turn, and was revoked or withdrawn, may be published again: the reaper
    # and its second message need the mark.
    task = record.tasks.get(task_id)
    if follows_itself(record, task_id) or (task is not None and task.copies):
        return
    record.drop_mark(task_id, now)
