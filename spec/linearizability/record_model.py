"""The specification of a store: the pure acts, over the record of one key.

An act takes the store's clock, which its caller does not see. In a workload every lease is a
fraction of an hour that no other deadline shares, and real time moves by seconds: *when* within an
act the clock is read decides nothing, and the checker may take the beginning of the phase. Where a
moment does show, in ``created_at`` and in the order of tasks by it, it is known or searched:

- ``acquire`` returns the store's clock, which must lie within the call's interval;
- the token of a ``start`` is the clock in microseconds, or one more than the last token: then a
  task whose record was lost is created at some earlier millisecond of the interval;
- a promoted follower, and a parked call that has its turn, are created at some millisecond of the
  interval.

Of the milliseconds of an interval, those are tried that some reply of the history has, and the
first one after each: a moment that no reply has shows only by which tasks are older.

A lapse is a jump of the clock by an hour between two phases, in which all processes stand still.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import permutations
from operator import attrgetter
from typing import Any

from celery_unique.stores import acts
from celery_unique.stores.base import Acquired, Claim, Finished, Orphan, Push, Started
from celery_unique.stores.record import MarksInMemory, Record, TaskEntry
from celery_unique.stores.record_followers import Following, Group, Lane
from celery_unique.stores.record_payloads import PayloadsInMemory

from .checker import Operation

#: How far two leases may lie apart that were computed from clocks of one phase. The leases of a
#: workload differ by 15 minutes at least.
SAME_LEASE_MS = 5 * 60_000
#: The server's clock is the machine's, rounded in its own way.
ROUNDED_MS = 2


class _Anything:
    def __contains__(self, reply: object) -> bool:
        return True


#: Replies that say that the act has changed nothing.
UNCHANGED: dict[str, Container[Any]] = {
    "read": _Anything(),
    "mark": _Anything(),
    "followers": _Anything(),
    "help": ("again", "published"),
    "release": (0,),
    "renew": (0,),
    "follow": (False,),
    "promote": ("gone",),
    "unmerge": (False,),
    "parked": _Anything(),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """The arguments of an act, and what is known of the store's clock while it ran."""

    given: tuple[Any, ...]
    phase_ms: int  # the clock at the beginning of the phase
    from_ms: int  # the clock at the call ...
    to_ms: int  # ... and at the return

    def __str__(self) -> str:
        return ", ".join(map(repr, self.given))


class RecordModel:
    """See `spec.linearizability.checker.Specification`."""

    def __init__(self, history: Iterable[Operation] = ()) -> None:
        shown = {moment for operation in history for moment in _moments(operation.reply)}
        self._moments = sorted(shown | {moment + 1 for moment in shown})

    def first(self) -> Record:
        return Record()

    def after(self, state: Record, operation: Operation) -> Iterable[Record]:
        for now_us in self._clocks(operation, state.token):
            for record in _orders(state, operation.act, operation.arguments.given):
                reply = _apply(record, operation.act, operation.arguments.given, now_us)
                if _agrees(operation, reply):
                    yield _canonical(record)

    def _clocks(self, operation: Operation, last_token: int) -> Iterator[int]:
        """The store's clock, in microseconds, at which the act may have run."""
        timed: Timed = operation.arguments
        reply = operation.reply
        if isinstance(reply, Acquired):
            if timed.from_ms - ROUNDED_MS <= reply.now <= timed.to_ms + ROUNDED_MS:
                yield reply.now * 1000
        elif operation.act == "start" and reply.token:
            yield reply.token
            if reply.lost and reply.token == last_token + 1:  # another one's clock was ahead
                yield from self._between(timed.from_ms, reply.token // 1000 - 1)
        elif called := 1 if operation.act == "promote" and reply == "publish" else _calls(reply):
            yield from self._between(timed.from_ms, timed.to_ms + ROUNDED_MS, called)
        else:
            yield timed.phase_ms * 1000

    def _between(self, from_ms: int, to_ms: int, created: int = 1) -> Iterator[int]:
        """Moments of an interval, in microseconds: one for each that makes a difference. Of several
        tasks that one act creates, each is a millisecond younger than the one before."""
        first, moments = from_ms - ROUNDED_MS, self._moments
        shown = moments[bisect_right(moments, first) : bisect_right(moments, to_ms + created)]
        tried = {moment - order for moment in shown for order in range(created)}
        for moment in sorted({first, *tried}):
            if first <= moment <= to_ms:
                yield moment * 1000

    def reads_only(self, operation: Operation) -> bool:
        reply = operation.reply
        if isinstance(reply, (Started, Finished)):
            return reply.verdict in ("superseded", "done", "not_yours")
        return reply in UNCHANGED.get(operation.act, ())

    def fingerprint(self, state: Record) -> Hashable:
        return (
            state.token,
            tuple(sorted((i, *task.packed()) for i, task in state.tasks.items())),
            tuple(sorted((i, *mark.packed()) for i, mark in state.marks.items())),
            repr(state.following.packed()) if state.following else "",
            tuple(sorted((i, repr(one.facts())) for i, one in state.followers.items())),
            _payloads_of(state),
        )


def _calls(reply: Any) -> int:
    """How many parked calls have become tasks by the act."""
    if isinstance(reply, Finished):
        return len(reply.called)
    orphans = reply if isinstance(reply, list) else ()
    return sum(isinstance(each, Orphan) and each.called is not None for each in orphans)


# -- time ---------------------------------------------------------------------


def _moments(reply: Any) -> Iterator[int]:
    """Moments of the store's clock that the reply has, and at which a task may be created."""
    if isinstance(reply, Acquired):
        yield reply.now
        if reply.holder is not None:
            yield reply.holder.created_at
    elif isinstance(reply, Started) and reply.token:
        yield reply.token // 1000
    elif isinstance(reply, Record):
        yield from (task.created_at for task in reply.tasks.values())


def _orders(record: Record, act: str, given: tuple[Any, ...]) -> Iterator[Record]:
    """Copies of the record: any of the tasks that were created in one millisecond may be taken
    for the newest. One id may be merged into several tasks here: any of them may lose its line, or
    be the one in which a repeated call finds its line."""
    if act == "unmerge" or (act == "acquire" and given[0].again and given[0].merge):
        for first in record.tasks or ("",):
            other = copied(record)
            other.tasks = {i: other.tasks[i] for i in sorted(other.tasks, key=first.__ne__)}
            yield other
        if act == "unmerge":
            return
    moments = Counter(task.created_at for task in record.tasks.values())
    tied = [i for i, task in record.tasks.items() if moments[task.created_at] > 1]
    if not tied or act not in ("acquire", "publish"):
        yield copied(record)
        return
    for order in permutations(tied):
        other = copied(record)
        other.tasks = {i: other.tasks[i] for i in (*(record.tasks.keys() - {*tied}), *order)}
        yield other


# -- acts ---------------------------------------------------------------------


def _apply(record: Record, act: str, given: tuple[Any, ...], now_us: int) -> Any:
    now = now_us // 1000
    if act == "start":
        return acts.start(record, *given, now_us)
    if act == "help":
        return acts.help_holder(record, *given, now)
    if act == "followers":
        return acts.followers_of(record, *given, now)
    if act == "parked":
        return acts.parked_ids(record, now)
    if act == "publish":
        return publish(record, *given, now)
    if act == "read":
        record.purge(now)
        return record
    if act == "mark":
        record.purge(now)
        return record.mark_of(*given, now)
    return getattr(acts, act)(record, *given, now)


def publish(record: Record, claim: Claim, push: Push, now: int) -> Acquired:
    """Lock and message in one act: an acquire, and if it creates the task, its confirm."""
    reply = acts.acquire(record, claim, now)
    if reply.outcome == "created":
        acts.confirm(record, claim.task_id, push.lease_ms, now)
    return reply


# -- replies ------------------------------------------------------------------


def _agrees(operation: Operation, expected: Any) -> bool:
    reply = operation.reply
    if operation.act == "read":
        return same_record(reply, expected)
    if operation.act in ("followers", "reap"):
        # Those that joined in one phase may stand in either order; parked calls may not.
        in_order = _called(reply) == _called(expected)
        return in_order and sorted(map(repr, reply)) == sorted(map(repr, expected))
    if isinstance(reply, Started) and reply.wait_ms and expected.wait_ms:
        apart = abs(reply.wait_ms - expected.wait_ms)
        return apart < SAME_LEASE_MS and reply == replace(expected, wait_ms=reply.wait_ms)
    if operation.act == "mark":
        return _seen_mark(reply) == _seen_mark(expected)
    if isinstance(reply, Acquired):
        return _same_acquired(reply, expected)
    return bool(reply == expected)


def _called(reply: list[Any]) -> list[str]:
    return [o.follower_id for o in reply if isinstance(o, Orphan) and o.called]


def _same_acquired(reply: Acquired, expected: Acquired) -> bool:
    if reply.holder is None or expected.holder is None:
        return reply == expected
    apart = abs(reply.holder.lease - expected.holder.lease)
    holder = replace(expected.holder, lease=reply.holder.lease)
    return apart < SAME_LEASE_MS and reply == replace(expected, holder=holder)


def same_record(one: Record, other: Record) -> bool:
    return _seen(one) == _seen(other)


def _seen(record: Record) -> Any:
    followers: Counter[str] = Counter()
    for group in record.following.groups.values() if record.following else ():
        followers[group.holder] += group.count
    return (
        {i: _seen_task(task) for i, task in record.tasks.items()},
        {i: _seen_mark(mark) for i, mark in record.marks.items()},
        followers,
        sorted(record.following.promoted) if record.following else [],
        _seen_lane(record.following.lane if record.following else None),
    )


def _seen_lane(lane: Lane | None) -> Any:
    return lane and (lane.last, lane.count, lane.called)


def _seen_task(task: TaskEntry) -> Any:
    return (
        *(task.state, task.created_at, task.eta, task.keep, task.duplicates),
        *(sorted(task.flags), task.by, task.after, task.arguments, task.since),
        *(task.delivery, 0 if _is_over(task) else task.token),
    )


def _is_over(task: TaskEntry) -> bool:
    return task.terminal and not task.ending and not task.rejected


def _seen_mark(mark: Any) -> Any:
    return mark and (mark.kind, mark.by, mark.lasting)


# -- states -------------------------------------------------------------------


_values = attrgetter(*(field.name for field in fields(TaskEntry)))


def copied(record: Record) -> Record:
    """A copy that an act may change. (``deepcopy`` takes thirty times as long.)"""
    following = record.following
    return Record(
        record.token,
        {i: TaskEntry(*_values(task)) for i, task in record.tasks.items()},
        dict(record.marks),
        following
        and Following(
            following.due_at,
            following.reaper,
            following.reaper_until,
            {name: Group(g.holder, g.count) for name, g in following.groups.items()},
            dict(following.promoted),
            following.lane and replace(following.lane, called=dict(following.lane.called)),
        ),
        dict(record.followers),
        record.more_until,
        record.more_marks,
        MarksInMemory(copy(getattr(record.beside, "_marks"))),  # noqa: B009
        _copied_payloads(record),
    )


def _copied_payloads(record: Record) -> PayloadsInMemory:
    tasks = getattr(record.payloads, "_tasks")  # noqa: B009
    return PayloadsInMemory({i: replace(one, lines=[*one.lines]) for i, one in tasks.items()})


def _payloads_of(record: Record) -> Hashable:
    tasks = getattr(record.payloads, "_tasks")  # noqa: B009
    return tuple(sorted((i, tuple(one.lines), one.until) for i, one in tasks.items()))


def _canonical(record: Record) -> Record:
    """Without what no reply shows, so that equal explanations are found to be equal."""
    if not record:
        return Record()  # the token goes with the record: the clock keeps it growing
    for task in record.tasks.values():
        task.last_duplicate_at = 0
        task.flags = "".join(sorted(task.flags))
        if _is_over(task):
            task.token = 0  # the delivery that ended it may report the same end again
    if record.following:
        record.following.promoted = dict.fromkeys(record.following.promoted, 0)
    return record
