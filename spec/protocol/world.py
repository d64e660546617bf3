"""The state of everything that takes part: store, broker, callers, workers, reapers, and time.

Times are milliseconds of the store's clock. One *tick* is the time in which a living process
renews its leases once; what lapses does so at a tick, and never in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Record, State, letters
from spec.linearizability.record_model import RecordModel, copied

TICK = 1000
BEGAN = 1_000_000
KEY = "1:key"
#: Half a tick more than a number of ticks, so that no two deadlines meet at a tick.
GRACE = TICK * 3 // 2
RUN_LEASE = TICK * 3 // 2
QUEUE_LEASE = TICK * 9 // 2
RETENTION = TICK * 5 // 2
#: No scenario goes on for longer: what still holds the key then holds it for ever.
LAST_TICK = 60

UNTIL_DONE = letters(["pending", "scheduled", "available", "active", "retryable"])
UNTIL_PUBLISHED = letters(["pending"])
WHILE_WAITING = letters(["scheduled", "available"])
UNTIL_START = letters(["pending", "scheduled", "available"])
UNTIL_SUCCESS = letters(["pending", "scheduled", "available", "active", "retryable", "completed"])
EVERY_STATE = letters(State)

Fault = Literal[
    "caller dies",  # at any point of its call
    "publish fails",  # the broker refuses the message, or takes it and the reply is lost
    "no reply",  # the store has acted, and its reply is lost
    "worker dies",  # what it has not acknowledged is redelivered
    "worker stops",  # and renews nothing until it continues
    "redelivery",  # the broker delivers a message again that a living worker has
    "reaper dies",
    "delay",  # time passes although a process could act: it is slow
    "fail-over",  # the store has forgotten its last write
    "release",  # an operator releases the key
    "revoke",  # an operator revokes a call: ``Scenario.revokes``
]


class Call(NamedTuple):
    """One caller of a scenario and its policy. The id of its task is its number."""

    strategy: str = "ignore"
    way: Literal["two steps", "atomic", "guard"] = "two steps"
    states: str = UNTIL_DONE
    delay: int = 0  # ticks to its ETA
    max_wait: int = 0
    window: int = 0
    joins: bool = False
    canvas: bool = False  # a canvas waits for its id
    on_error: Literal["raise", "publish"] = "raise"
    retries: int = 0  # how often its body asks for a retry
    fails: bool = False  # its body raises
    after_result: int = -1  # it calls once it has seen the result of this one
    in_body_of: int = -1  # it calls from this one's body
    limit: int = 1
    max_queue: int = 0


class Scenario(NamedTuple):
    calls: tuple[Call, ...]
    faults: tuple[tuple[str, int], ...] = ()
    late: bool = False  # acknowledged after the body
    workers: int = 2
    reapers: int = 0
    one_act: bool = False  # result and release are one act, as on Redis
    revokes: int = 0  # which call an operator may revoke
    about: str = ""


class Message(NamedTuple):
    task_id: int
    again: bool = False  # the worker knows that there may be another one
    number: int = 0  # of the retry
    values: int = -1  # of which call it has the values: a copy has those of its publisher


class Caller(NamedTuple):
    at: str = "begin"
    outcome: str = ""  # created, duplicate, rejected, joined, raised, bypassed
    holder: int = -1
    acquired_at: int = 0
    merged: bool = False  # it acquires again, and its values may be in a payload
    lease: int = 0  # of its holder, when it acquired


class Run(NamedTuple):
    """A delivery in a worker, from its start to its end."""

    task_id: int
    delivery: str
    token: int
    message: Message
    at: str = "body"
    acked: bool = False
    settle: bool = False
    followed: bool = False
    lost_connection: bool = False
    stalled: bool = False  # its worker stopped meanwhile, and may have lost it


class Worker(NamedTuple):
    runs: tuple[Run, ...] = ()
    held: tuple[Message, ...] = ()  # told to wait
    stopped: bool = False
    called: tuple[str, ...] = ()  # parked calls that have their turn: to be published
    unconfirmed: str = ""


class Reaper(NamedTuple):
    orphans: tuple[str, ...] = ()  # ids; what it knows of each is read anew
    fates: tuple[str, ...] = ()
    promoted: str = ""  # to be published; or a parked call that has its turn
    unconfirmed: str = ""


class Ghost(NamedTuple):
    """What happened, as far as the invariants must know of it."""

    ends: tuple[int, ...]  # how often each body ran to its end
    starts: tuple[int, ...]
    results: frozenset[int] = frozenset()
    completed: frozenset[int] = frozenset()  # followers whose result came from another task
    superseded_by: tuple[int, ...] = ()
    raised: frozenset[int] = frozenset()  # withdrawn: must not run
    revoked: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()  # acknowledged early by a worker that died
    excused: frozenset[str] = frozenset()  # invariants that a fault has suspended
    deliveries: int = 0
    last_token: int = 0
    parked: tuple[int, ...] = ()  # in the order of their admission
    called: tuple[int, ...] = ()  # in the order in which they had their turn
    merged: tuple[int, ...] = ()  # calls with values, in the order of their admission
    #: With the values of which calls each task ran first.
    ran_with: tuple[tuple[int, tuple[int, ...]], ...] = ()
    unmerged: frozenset[int] = frozenset()  # calls that raised, and whose values were removed
    wrong: str = ""


@dataclass(slots=True)
class World:
    now: int
    record: Record
    previous: Record | None
    queue: tuple[Message, ...]
    callers: tuple[Caller, ...]
    workers: tuple[Worker, ...]
    reapers: tuple[Reaper, ...]
    faults: tuple[tuple[str, int], ...]
    ghost: Ghost
    keyed: Hashable = field(default=None)

    def key(self) -> Hashable:
        if self.keyed is None:
            fingerprint = RecordModel().fingerprint
            self.keyed = (
                self.now,
                fingerprint(self.record),
                None if self.previous is None else fingerprint(self.previous),
                tuple(sorted(self.queue)),
                self.callers,
                self.workers,
                self.reapers,
                self.faults,
                self.ghost,
            )
        return self.keyed

    # -- changes: each returns a new world ------------------------------------

    def but(self, **changes: Any) -> World:
        return replace(self, keyed=None, **changes)

    def with_caller(self, c: int, **changes: Any) -> World:
        return self.but(callers=put(self.callers, c, self.callers[c]._replace(**changes)))

    def with_worker(self, w: int, **changes: Any) -> World:
        return self.but(workers=put(self.workers, w, self.workers[w]._replace(**changes)))

    def with_run(self, w: int, n: int, **changes: Any) -> World:
        runs = self.workers[w].runs
        return self.with_worker(w, runs=put(runs, n, runs[n]._replace(**changes)))

    def without_run(self, w: int, n: int) -> World:
        return self.with_worker(w, runs=put_out(self.workers[w].runs, n))

    def with_reaper(self, r: int, **changes: Any) -> World:
        return self.but(reapers=put(self.reapers, r, self.reapers[r]._replace(**changes)))

    def noting(self, **changes: Any) -> World:
        return self.but(ghost=self.ghost._replace(**changes))

    def excusing(self, *invariants: str) -> World:
        return self.noting(excused=self.ghost.excused | set(invariants))

    def wrong(self, sentence: str) -> World:
        return self.noting(wrong=self.ghost.wrong or sentence)

    def published(self, message: Message) -> World:
        return self.but(queue=tuple(sorted((*self.queue, message))))

    def after_fault(self, fault: str) -> World | None:
        """With one of these faults less to come; None if there was none left."""
        left = dict(self.faults)
        if not left.get(fault):
            return None
        left[fault] -= 1
        return self.but(faults=tuple(sorted(left.items())))


def put(values: Any, n: int, value: Any) -> Any:
    return (*values[:n], value, *values[n + 1 :])


def put_out(values: Any, n: int) -> Any:
    return (*values[:n], *values[n + 1 :])


class WithModelClock:
    """The shipped store in memory, whose clock the model moves."""

    now_us = 0

    def _now_us(self) -> int:
        return self.now_us


class Store:
    """Runs one act of the shipped store on the record of a world."""

    def __init__(self, store_class: type[MemoryStore] = MemoryStore) -> None:
        self._store: Any = type("ModelStore", (WithModelClock, store_class), {})()
        #: How often each act had each kind of reply.
        self.acts: Counter[str] = Counter()

    def act(self, world: World, act: str, *given: Any) -> tuple[World, Any]:
        """The world that the act leaves, and its reply."""
        store = self._store
        # Two starts never fall into one microsecond.
        store.now_us = world.now * 1000 + world.ghost.deliveries
        store._records = {KEY: copied(world.record)} if world.record else {}
        following = world.record.following
        store._due = {KEY: following.due_at} if following is not None else {}
        reply = store.renew(given)[0] if act == "renew" else getattr(store, act)(KEY, *given)
        record = store._records.get(KEY) or Record()
        due = store._due.get(KEY)
        if record.following is not None and due is not None:
            record.following.due_at = due
        self.acts[f"{act}: {_kind(reply)}"] += 1
        previous = world.record if world.previous is not None else None
        return world.but(record=record, previous=previous), reply

    def is_due(self, world: World) -> bool:
        following = world.record.following
        if following is None:
            return False
        store = self._store
        store.now_us = world.now * 1000
        store._due = {KEY: following.due_at}
        return bool(store.due())


def _kind(reply: Any) -> str:
    for name in ("outcome", "verdict"):
        if hasattr(reply, name):
            return str(getattr(reply, name))
    if isinstance(reply, list):
        return "some" if reply else "none"
    if isinstance(reply, int) and not isinstance(reply, bool):
        return "0" if reply == 0 else "1 or more"
    return str(reply)
