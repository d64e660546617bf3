"""Followers of the tasks of a key: duplicates that share the outcome of their holder.

A follower belongs to a *group*, and the group has a holder. So any number of them can follow
another task with one write. The groups and their sizes are a small part of the key's record; the
followers, with their whole messages, are stored beside it and read only when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_unique.exceptions import UnreadableRecord
from celery_unique.keys.digest import short_key

#: How long followers are kept beyond the time at which a worker should have reaped them. All
#: workers may be down for a long weekend, and a lost follower is a lost task; but their messages
#: contain arguments, which must not be kept for longer than that.
KEPT_MS = 3 * 24 * 3_600_000
#: How long parked calls are kept beyond the time at which a worker should have called the next
#: one: a broker would keep their messages for as long as they are not received.
PARKED_KEPT_MS = 30 * 24 * 3_600_000


#: What reading a record raises that another program has written.
UNREADABLE = (
    *(ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, RecursionError, OverflowError),
)


def typed(values: list[Any], kinds: tuple[type, ...]) -> list[Any]:
    """The values, if they have these types: a wrong one must fail here, not in an act."""
    if type(values) is not list:
        raise ValueError("it is not a list of values")
    for n, (value, kind) in enumerate(zip(values, kinds, strict=False)):
        if type(value) is kind:
            continue
        # Lua writes large numbers as fractions.
        if kind is not int or type(value) is not float or not value.is_integer():
            raise ValueError(f"value {n + 1} is a {type(value).__name__}, not a {kind.__name__}")
        values[n] = int(value)
    return values


def unreadable(key: str, why: str | Exception, store: str) -> UnreadableRecord:
    """The error of acts on a key whose record cannot be read."""
    if isinstance(why, Exception):
        why = f"{type(why).__name__}: {why}" if isinstance(why, ValueError) else type(why).__name__
    short = short_key(key)
    return UnreadableRecord(
        f"What the lock store {store} holds of key {short} cannot be read: {why}. Another program "
        "or an incompatible release wrote it. Other keys are not affected. Delete it with: "
        f"celery -A APP unique release {short}",
        store=store,
        key=key,
    )


@dataclass(slots=True)
class Follower:
    """A follower as stores return it."""

    holder: str  # id of the task whose outcome becomes its own
    message: str  # its whole message, to publish or complete it
    promoted: bool = False  # it has become a task of the key itself, and is not confirmed yet


@dataclass(frozen=True, slots=True)
class Parked:
    """Of a call that waits in a lane: when its turn comes, and what it is then."""

    number: int  # its place in the order of admission
    states: str  # letters of the states in which another task blocks it
    window_ms: int
    limit: int  # it is called while fewer tasks than this block it
    grace_ms: int
    eta: int  # 0: none
    flags: str  # of its task

    def packed(self) -> list[Any]:
        values = (self.number, self.states, self.window_ms, self.limit, self.grace_ms)
        return [*values, self.eta, self.flags]

    @classmethod
    def unpacked(cls, values: list[Any]) -> Parked:
        return cls(*typed(values[:7], (int, str, int, int, int, int, str)))


def place(number: int) -> str:
    """The id under which the store finds the parked call with this number: no task has such an
    id, and the message stored with it is the id of the call."""
    return f"\n{number}"


@dataclass(frozen=True, slots=True)
class Joined:
    """A follower as it is stored, with what it needs to become a task itself."""

    group: str  # empty once it is promoted, and of a parked call
    joined_at: int
    message: str
    task_name: str = ""
    keep: str = ""
    kept_ms: int = 0  # of an ended task, from its creation
    arguments: str = ""
    parked: Parked | None = None

    def facts(self) -> list[Any]:
        """All but the message, which may be long."""
        facts: list[Any] = [
            self.group,
            self.joined_at,
            self.task_name,
            self.keep,
            self.kept_ms,
            self.arguments,
        ]
        return facts if self.parked is None else [*facts, self.parked.packed()]

    @classmethod
    def of(cls, facts: list[Any], message: str) -> Joined:
        # Facts beyond those known here were written by a newer release: ignored.
        group, joined_at, *rest = typed(facts[:6], (str, int, str, str, int, str))
        if len(facts) > 6:
            rest.append(Parked.unpacked(facts[6]))
        return cls(group, joined_at, message, *rest)


@dataclass(slots=True)
class Group:
    """Followers of one holder."""

    holder: str
    count: int = 0


@dataclass(slots=True)
class Lane:
    """The summary of a key's parked calls."""

    first: int = 1  # the number of the oldest, or a smaller one
    last: int = 0  # the number given last
    count: int = 0  # how many are parked
    #: Calls that had their turn: tasks of the key, whose publish is not confirmed. id: number
    called: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.count or self.called)

    def packed(self) -> dict[str, Any]:
        return {"f": self.first, "l": self.last, "n": self.count, "c": self.called}

    @classmethod
    def unpacked(cls, document: dict[str, Any]) -> Lane:
        first, last, count = typed([document[name] for name in "fln"], (int, int, int))
        called = dict(document["c"])
        places = typed(list(called.values()), (int,) * len(called))
        return cls(first, last, count, dict(zip(called, places, strict=True)))


@dataclass(slots=True)
class Following:
    """The summary of a key's followers in its record. A key without followers has none."""

    due_at: int = 0  # when a worker should reap them
    reaper: str = ""  # the worker that reaps them now ...
    reaper_until: int = 0  # ... and until when its claim lasts
    groups: dict[str, Group] = field(default_factory=dict)
    promoted: dict[str, int] = field(default_factory=dict)  # id: when
    lane: Lane | None = None

    def __bool__(self) -> bool:
        return bool(self.groups or self.promoted or self.lane)

    @property
    def kept_until(self) -> int:
        """When all of it is forgotten, if no worker has reaped it."""
        return self.due_at + (KEPT_MS if self.lane is None else PARKED_KEPT_MS)

    def groups_of(self, holder: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.holder == holder]

    def group_for(self, holder: str) -> str:
        """The name of a group that follows the holder."""
        known = self.groups_of(holder)
        if known:
            return min(known, key=int)
        number = 1
        while str(number) in self.groups:
            number += 1
        self.groups[str(number)] = Group(holder)
        return str(number)

    def holder_of(self, follower_id: str, joined: Joined) -> str:
        """The id of the task that it follows; a promoted one follows itself."""
        return self.groups[joined.group].holder if joined.group else follower_id

    def packed(self) -> dict[str, Any]:
        document = {
            "d": self.due_at,
            "r": self.reaper,
            "u": self.reaper_until,
            "g": {name: [group.holder, group.count] for name, group in self.groups.items()},
            "p": self.promoted,
        }
        return document if self.lane is None else {**document, "q": self.lane.packed()}

    @classmethod
    def unpacked(cls, document: dict[str, Any]) -> Following:
        groups = {
            str(int(name)): Group(*typed(values[:2], (str, int)))
            for name, values in dict(document["g"]).items()
        }
        names, moments = list(dict(document["p"])), list(dict(document["p"]).values())
        promoted = dict(zip(names, typed(moments, (int,) * len(moments)), strict=True))
        due_at, reaper, until = typed([document[name] for name in "dru"], (int, str, int))
        lane = Lane.unpacked(document["q"]) if "q" in document else None
        return cls(due_at, reaper, until, groups, promoted, lane)
