"""Lanes: calls that are parked under their key, and called in the order of their admission.

A parked call is stored as a follower is, with its whole message, but it waits for a place and not
for a result: it is called as soon as fewer tasks than its limit block it. Then it is a pending task
of the key, whose message a worker publishes; the message stays stored until that is confirmed.
"""

from __future__ import annotations

from typing import Literal

from celery_unique.stores.base import Acquired, Called, Claim, holder_of
from celery_unique.stores.record import Record, TaskEntry
from celery_unique.stores.record_followers import Following, Joined, Lane, Parked, place

from .blocking import blockers

REPLACING = ("replace", "replace_except_schedule")
#: How long a task may wait in the broker before a worker checks that its message is not lost, if
#: calls are parked behind it.
LOOK_MS = 60_000
#: How many calls one act calls at most.
CALLED_AT_ONCE = 20


def is_parked(record: Record, task_id: str) -> bool:
    """Whether the call waits in the lane, or was called and its publish is not confirmed."""
    lane = record.following.lane if record.following is not None else None
    joined = record.followers.get(task_id) if lane is not None else None
    return joined is not None and joined.parked is not None


def waits(record: Record) -> bool:
    """Whether calls wait in the lane, which a new one must not overtake."""
    lane = record.following.lane if record.following is not None else None
    return lane is not None and (lane.count > 0 or any(i not in record.tasks for i in lane.called))


def queued(record: Record, claim: Claim, now: int) -> Acquired:
    """The reply to a call that is parked already."""
    found = blockers(record, claim.states, claim.window_ms, now)
    if claim.task_id in record.tasks and claim.task_id not in found:
        found.append(claim.task_id)
        found.sort(key=lambda task_id: record.tasks[task_id].created_at)
    return _reply("queued", record, found, now)


def _reply(
    outcome: Literal["queued", "full"], record: Record, blocked_by: list[str], now: int
) -> Acquired:
    running = [i for i in blocked_by if record.tasks[i].running]
    named = (running or blocked_by)[-1:]
    holder = holder_of(named[0], record.tasks[named[0]], now) if named else None
    lane = record.following.lane if record.following is not None else None
    return Acquired(outcome, holder, now, position=lane.count if lane is not None else 0)


def full(record: Record, claim: Claim, blocked_by: list[str], now: int) -> Acquired | None:
    """The reply to a call that may not be parked, since too many are; None: it may."""
    lane = record.following.lane if record.following is not None else None
    if lane is None or not claim.max_queue or lane.count < claim.max_queue:
        return None
    return _reply("full", record, blocked_by, now)


def park(record: Record, claim: Claim, blocked_by: list[str], now: int) -> Acquired:
    """Park the call behind all others. It follows no task."""
    following = record.following or Following()
    lane = following.lane or Lane()
    reply = _reply("queued", record, blocked_by, now)
    # An older message of this id may still arrive, as for any task that is created.
    known = [record.drop_mark(claim.task_id, now), record.tasks.pop(claim.task_id, None)]
    lane.last += 1
    lane.count += 1
    parked = Parked(
        lane.last,
        claim.states,
        claim.window_ms,
        claim.limit,
        claim.grace_ms,
        now + claim.delay_ms if claim.delay_ms else 0,
        ("c" if claim.canvas else "") + ("m" if any(known) else ""),
    )
    kept_ms = claim.keep_ms or claim.window_ms
    facts = (claim.task_name, claim.keep, kept_ms, claim.arguments)
    record.followers[claim.task_id] = Joined("", now, claim.join, *facts, parked=parked)
    record.followers[place(lane.last)] = Joined("", now, claim.task_id)
    following.lane, record.following = lane, following
    reply.position = lane.count
    return reply


def leave(record: Record, task_id: str, parked: Parked) -> None:
    """The call waits no more: it is published, withdrawn or revoked. Its own entry is removed or
    changed by the caller."""
    lane = record.following.lane if record.following is not None else None
    if lane is None:
        return
    if lane.called.pop(task_id, None) is None:
        record.followers.pop(place(parked.number), None)
        lane.count -= 1
    if not lane and record.following is not None:
        record.following.lane = None


def call(record: Record, now: int) -> tuple[Called, ...]:
    """Make tasks of the calls that have their turn; oldest first."""
    called: list[Called] = []
    while len(called) < CALLED_AT_ONCE:
        found = _next(record)
        if found is None or _free_at(record, found[1], now) > now:
            break
        task_id, parked = found
        called.append(_become_task(record, task_id, parked, now, len(called)))
    return tuple(called)


def unconfirmed(record: Record) -> tuple[Called, ...]:
    """The calls that have their turn and are not confirmed, for a worker that may have lost the
    reply with their messages. They may be published already."""
    lane = record.following.lane if record.following is not None else None
    called: list[Called] = []
    for _, task_id in sorted((number, i) for i, number in lane.called.items()) if lane else ():
        task, joined = record.tasks.get(task_id), record.followers.get(task_id)
        if task is not None and task.pending and joined is not None:
            task.flag("m")
            called.append(Called(task_id, joined.message, again=True))
    return tuple(called)


def due_at(record: Record, now: int) -> int | None:
    """When a worker should call the next one, or one again whose publish was not confirmed; None:
    nothing waits."""
    lane = record.following.lane if record.following is not None else None
    if lane is None:
        return None
    times = [record.tasks[i].lease for i in lane.called if i in record.tasks]
    found = _next(record)
    if found is not None:
        times += [_free_at(record, found[1], now), *_looks_at(record, found[1], now)]
    return min(times, default=None)


def _next(record: Record) -> tuple[str, Parked] | None:
    """The call whose turn it is. First one that was called before, and whose grace has passed: its
    publisher died, or was too slow."""
    lane = record.following.lane if record.following is not None else None
    if lane is None:
        return None
    lapsed = [(number, i) for i, number in lane.called.items() if i not in record.tasks]
    for _, task_id in sorted(lapsed):
        joined = record.followers.get(task_id)
        if joined is not None and joined.parked is not None:
            return task_id, joined.parked
        del lane.called[task_id]
    while lane.count and lane.first <= lane.last:
        index = record.followers.get(place(lane.first))
        joined = record.followers.get(index.message) if index is not None else None
        if index is not None and joined is not None and joined.parked is not None:
            return index.message, joined.parked
        lane.first += 1  # it has left the lane
    lane.count = 0
    return None


def _free_at(record: Record, parked: Parked, now: int) -> int:
    """When fewer tasks than its limit will block the call, if nothing happens until then."""
    times = []
    for task_id in blockers(record, parked.states, parked.window_ms, now):
        task = record.tasks[task_id]
        window_ends = task.created_at + parked.window_ms if parked.window_ms else task.lease
        times.append(min(task.lease, window_ends))
    if len(times) < parked.limit:
        return now
    return sorted(times)[len(times) - parked.limit]


def _looks_at(record: Record, parked: Parked, now: int) -> list[int]:
    """When a worker should check that the messages of tasks that block the call are not lost: after
    a minute, and again whenever they have waited for twice as long."""
    blocking = [record.tasks[i] for i in blockers(record, parked.states, parked.window_ms, now)]
    since = [max(task.created_at, task.eta) for task in blocking if task.waiting]
    return [max(now, waits) + max(LOOK_MS, now - waits) for waits in since]


def _become_task(record: Record, task_id: str, parked: Parked, now: int, order: int) -> Called:
    """``order``: of the calls of one act, each is a millisecond younger than the one before."""
    assert record.following is not None
    assert record.following.lane is not None
    lane, joined = record.following.lane, record.followers[task_id]
    again = task_id in lane.called
    # Called again, its first message may have been published, too.
    flags = parked.flags + ("m" if again and "m" not in parked.flags else "")
    record.tasks[task_id] = TaskEntry(
        state="p",
        created_at=now + order,
        lease=now + parked.grace_ms,
        task_name=joined.task_name,
        window_ends=now + joined.kept_ms if joined.kept_ms else 0,
        eta=parked.eta if parked.eta > now else 0,
        keep=joined.keep,
        arguments=joined.arguments,
        flags=flags,
    )
    if not again:
        record.followers.pop(place(parked.number), None)
        lane.first = parked.number + 1
        lane.count -= 1
        lane.called[task_id] = parked.number
    return Called(task_id, joined.message, again)


def parked_ids(record: Record, now: int) -> list[str]:
    """The calls in the lane, the next one first; not those that were called."""
    record.purge(now)
    lane = record.following.lane if record.following is not None else None
    if lane is None or not lane.count:
        return []
    found = [
        (joined.parked.number, task_id)
        for task_id, joined in record.followers.items()
        if joined.parked is not None and task_id not in lane.called
    ]
    return [task_id for _, task_id in sorted(found)]


def beyond_limit(
    record: Record, claim: Claim, found: list[str], active: list[str], waiting: list[str]
) -> tuple[list[str], list[str], list[str]]:
    """Of the tasks that block a call: those that still do, since its limit is more than one task;
    and of those the active ones, and those that it would replace."""
    if len(found) < claim.limit:
        return [], [], []
    if claim.on_conflict in REPLACING:
        # The oldest make room. Those that have ended need none.
        over = len(active) + len(waiting) - claim.limit + 1
        if over > len(waiting):
            return found, active, waiting
        return waiting[: max(0, over)], [], waiting[: max(0, over)]
    if claim.on_conflict == "rerun" and claim.parent not in active and len(active) < claim.limit:
        return waiting or found, [], waiting  # one of those that wait will see what has changed
    return found, active, [i for i in waiting if record.tasks[i].after]
