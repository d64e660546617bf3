"""Followers: which task each follows, and when a worker should reap them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from celery_unique.stores.base import Claim
from celery_unique.stores.record import Record
from celery_unique.stores.record_followers import Follower, Following, Joined

from . import lanes
from .blocking import in_limbo


def attach(record: Record, claim: Claim, holder: str, now: int) -> None:
    """Let the call follow the holder, whichever task it followed before."""
    stop_following(record, claim.task_id)
    if record.following is None:
        record.following = Following()
    following = record.following
    joined = Joined(
        following.group_for(holder),
        now,
        claim.join,
        claim.task_name,
        claim.keep,
        claim.keep_ms or claim.window_ms,
        claim.arguments,
    )
    following.groups[joined.group].count += 1
    record.followers[claim.task_id] = joined
    set_due_time(record, now)


def follow(record: Record, claim: Claim, holder: str, now: int) -> bool:
    """Let the task of a received message follow the holder, or what replaced that."""
    record.purge(now)
    if claim.task_id in record.tasks:
        return False
    seen = {claim.task_id}
    mark = record.mark_of(holder, now)
    # Bounded: the reaper lets an orphan follow another task.
    while mark is not None and mark.by and mark.by not in seen and len(seen) <= 100:
        seen.add(holder)
        holder = mark.by
        mark = record.mark_of(holder, now)
    if mark is None and holder not in record.tasks:
        holder = _newest_since(record, claim, now) or holder
    attach(record, claim, holder, now)
    return True


def _newest_since(record: Record, claim: Claim, now: int) -> str:
    """What replaced the task, where the message of a replacement in between was reached first and
    its mark is gone: the newest task that was created later; empty for none."""
    later = [
        (task.created_at, task_id)
        for task_id, task in record.tasks.items()
        if 0 < claim.created_at <= task.created_at
        and task.arguments == claim.arguments
        and not in_limbo(record, task)
        and orphaned_at(record, task_id, now) > now
    ]
    return max(later, default=(0, ""))[1]


def attached_to(record: Record, follower_id: str, now: int) -> str:
    """The living task that it follows; itself, if it is promoted; empty for none."""
    following = record.following
    joined = record.followers.get(follower_id) if following else None
    if following is None or joined is None or joined.parked is not None:
        return ""
    holder = following.holder_of(follower_id, joined)
    return holder if orphaned_at(record, holder, now) > now else ""


def stop_following(record: Record, follower_id: str) -> None:
    """Remove a follower that has its result, or is a task that is published, runs or has ended."""
    following = record.following
    joined = record.followers.pop(follower_id, None) if following else None
    if following is not None and joined is not None:
        if joined.parked is not None:
            lanes.leave(record, follower_id, joined.parked)
        leave_group(following, follower_id, joined)


def leave_group(following: Following, follower_id: str, joined: Joined) -> None:
    following.promoted.pop(follower_id, None)
    if joined.group:
        group = following.groups[joined.group]
        group.count -= 1
        if not group.count:
            del following.groups[joined.group]


def move(record: Record, follower_id: str, holder: str) -> None:
    """Let one follower follow another task; it may have been promoted before."""
    following = record.following
    joined = record.followers.get(follower_id)
    if following is None or joined is None:
        return
    if joined.parked is not None:
        lanes.leave(record, follower_id, joined.parked)
    leave_group(following, follower_id, joined)
    group = following.group_for(holder)
    following.groups[group].count += 1
    record.followers[follower_id] = replace(joined, group=group, parked=None)


def follow_instead(record: Record, holder: str, other: str) -> None:
    """Let all followers of one task follow another."""
    if record.following is not None:
        for name in record.following.groups_of(holder):
            record.following.groups[name].holder = other


def follows_itself(record: Record, task_id: str) -> bool:
    """Whether it is a call that had its turn or was promoted, and is not confirmed yet."""
    following = record.following
    joined = record.followers.get(task_id) if following else None
    return bool(following and joined and following.holder_of(task_id, joined) == task_id)


def is_followed(record: Record, task_id: str) -> bool:
    return record.following is not None and bool(record.following.groups_of(task_id))


def number_of_followers(record: Record, task_id: str) -> int:
    groups = record.following.groups.values() if record.following is not None else ()
    return sum(group.count for group in groups if group.holder == task_id)


def complete_follower(record: Record, follower_id: str, now: int) -> None:
    record.purge(now)
    if record.following is not None and follower_id in record.followers:
        stop_following(record, follower_id)
        set_due_time(record, now)


def followers_of(record: Record, holder: str | None, now: int) -> list[tuple[str, Follower]]:
    record.purge(now)
    following = record.following
    if following is None:
        return []
    if holder is None:
        found = members(record, following.groups, following.promoted)
    else:
        found = members(record, following.groups_of(holder), ())
    return [
        (i, Follower(following.holder_of(i, joined), joined.message, not joined.group))
        for i, joined in sorted(found.items(), key=age)
        if i != holder
    ]


def members(record: Record, groups: Collection[str], promoted: Iterable[str]) -> dict[str, Joined]:
    """The followers in these groups, and these promoted ones. Reads no parked calls, of which a
    lane can have very many, unless a group has a follower that is not its own holder."""
    following = record.following
    assert following is not None
    found = {i: record.followers[i] for i in promoted if i in record.followers}
    left = 0
    for name in groups:
        group = following.groups[name]
        own = record.followers.get(group.holder)
        left += group.count
        if own is not None and own.group == name:  # a revoked call follows itself
            found[group.holder] = own
            left -= 1
    if left:
        in_groups = getattr(record.followers, "in_groups", record.followers.items)
        found |= {i: joined for i, joined in in_groups() if joined.group in groups}
    return found


def age(follower: tuple[str, Joined]) -> tuple[int, str]:
    """Oldest first; of those that joined in one millisecond, by id."""
    return follower[1].joined_at, follower[0]


def set_due_time(record: Record, now: int) -> None:
    """Set when a worker should reap the followers: at the first moment at which one of them may
    have lost its holder.

    Called by every act that changes what they wait for; for a longer lease only if calls are
    parked. Else a reaper comes too early, finds the holder alive and comes again.
    """
    following = record.following
    if not following:
        record.following = None
        return
    call_at = lanes.due_at(record, now) if following.lane is not None else None
    if not following.lane:
        following.lane = None
    holders = [group.holder for group in following.groups.values()]
    orphaned = [orphaned_at(record, i, now) for i in [*holders, *following.promoted]]
    earliest = min(orphaned, default=call_at)
    if earliest is None:  # parked calls alone, and the store has lost them
        record.following = None
        return
    busy = orphaned and (earliest <= now or following.promoted)
    if following.reaper_until > now and busy:
        following.due_at = max(earliest, following.reaper_until)
    else:
        following.due_at = earliest
        following.reaper, following.reaper_until = "", 0
    if call_at is not None:
        following.due_at = min(following.due_at, call_at)


def orphaned_at(record: Record, task_id: str, now: int) -> int:
    """Until when the task is certain to serve its followers; now, if it is not."""
    task = record.tasks.get(task_id)
    if task is None:
        return now
    runs = max(now, task.delivery_lease) if task.delivery else now
    if task.ending:
        return min(task.lease, runs)
    if task.terminal:
        return now
    # Released by an operator, perhaps because its message is lost: it counts only while it runs.
    return min(task.lease, runs) if task.released else task.lease
