"""Followers that have lost their holder: reap and promote."""

from __future__ import annotations

from dataclasses import replace

from celery_unique.stores.base import ORPHANS_AT_ONCE, Orphan, Promotion
from celery_unique.stores.record import Mark, Record, TaskEntry
from celery_unique.stores.record_followers import Following, Joined

from . import lanes, merge
from .blocking import in_limbo
from .followers import age, follow_instead, leave_group, members, move, orphaned_at, set_due_time


def reap(record: Record, reaper: str, claim_ms: int, now: int) -> list[Orphan]:
    record.purge(now)
    called = [
        Orphan(c.task_id, c.task_id, c.message, c.again, "called") for c in lanes.call(record, now)
    ]
    if called:
        set_due_time(record, now)
    following = record.following
    if following is None or _claimed_by_another(following, reaper, now):
        return called
    lost = {
        name
        for name, group in following.groups.items()
        if orphaned_at(record, group.holder, now) <= now
    }
    unconfirmed = {i for i in following.promoted if orphaned_at(record, i, now) <= now}
    if lost or unconfirmed:
        following.reaper, following.reaper_until = reaper, now + claim_ms
        set_due_time(record, now)
        found = sorted(
            members(record, lost, unconfirmed).items(),
            key=lambda one: (one[1].group != "", *age(one)),
        )
        return called + [_orphan(record, following, *one, now) for one in found[:ORPHANS_AT_ONCE]]
    set_due_time(record, now)
    return called


def _claimed_by_another(following: Following, reaper: str, now: int) -> bool:
    return following.reaper_until > now and following.reaper != reaper


def _orphan(
    record: Record, following: Following, follower_id: str, joined: Joined, now: int
) -> Orphan:
    holder = following.holder_of(follower_id, joined)
    mark = record.mark_of(holder, now)
    ended = holder in record.tasks and record.tasks[holder].terminal
    fate = mark.kind if mark is not None else "done" if ended else ""
    return Orphan(follower_id, holder, joined.message, not joined.group, fate)


def promote(
    record: Record, follower_id: str, reaper: str, grace_ms: int, mark_ms: int, now: int
) -> Promotion:
    record.purge(now)
    following = record.following
    joined = record.followers.get(follower_id) if following else None
    if following is None or joined is None or _claimed_by_another(following, reaper, now):
        return "gone"
    if joined.parked is not None:
        return "gone"  # it waits for its turn, and for no task
    holder = following.holder_of(follower_id, joined)
    if orphaned_at(record, holder, now) > now:
        # This reaper promoted it before and may have lost the reply: publish it again.
        mine = following.reaper == reaper and following.reaper_until > now
        return "follows" if joined.group else "publish" if mine else "gone"
    other = _other_task(record, (follower_id, holder), joined.arguments, now)
    merged = merge.waits_for_a_run(record, follower_id, holder)
    takes_payload = bool(other) and record.tasks[other].merges and record.tasks[other].unstarted
    if other and (takes_payload or not merged):
        follow_instead(record, holder, other)
        if merged:
            merge.hand_over(record, holder, other)
        if not joined.group:
            # Its message may be published: the gate drops it. The result comes from the other.
            record.tasks.pop(follower_id, None)
            record.put_mark(follower_id, Mark("done", now + mark_ms), now)
            move(record, follower_id, other)
        set_due_time(record, now)
        return "follows"
    _become_task(record, follower_id, joined, grace_ms, now)
    if merged:  # no other task runs with its values
        merge.hand_over(record, holder, follower_id)
        record.tasks[follower_id].after = other
    follow_instead(record, holder, follower_id)
    set_due_time(record, now)
    return "publish"


def _other_task(record: Record, but: tuple[str, str], arguments: str, now: int) -> str:
    """A task of the key whose outcome can be the follower's: one that runs, else one that waits,
    else one that has ended; the newest of them. Empty for none."""
    found = []
    for task_id, task in record.tasks.items():
        rank = _rank(task, now)
        fits = rank and task.arguments == arguments and not task.released
        if task_id not in but and fits and not in_limbo(record, task):
            found.append((rank, task.created_at, task_id))
    return max(found, default=(0, 0, ""))[2]


def _rank(task: TaskEntry, now: int) -> int:
    if task.running:
        return 3
    if not task.terminal:
        return 2
    abandoned = task.ending and task.delivery_lease <= now
    return 0 if task.state == "x" or abandoned else 1


def _become_task(record: Record, follower_id: str, joined: Joined, grace_ms: int, now: int) -> None:
    """Its message stays stored until it is confirmed: its publisher may die before."""
    record.tasks[follower_id] = TaskEntry(
        state="p",
        created_at=now,
        lease=now + grace_ms,
        task_name=joined.task_name,
        window_ends=now + joined.kept_ms if joined.kept_ms else 0,
        keep=joined.keep,
        arguments=joined.arguments,
        flags="m",  # more than one reaper may publish it
    )
    # A mark would drop the message at the gate.
    record.drop_mark(follower_id, now)
    if record.following is not None:
        leave_group(record.following, follower_id, joined)
        record.following.promoted[follower_id] = now
    record.followers[follower_id] = replace(joined, group="")
