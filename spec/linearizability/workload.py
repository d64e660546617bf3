"""Acts at random, from many threads of many processes, on a few keys and a few ids.

A *round* has keys of its own and several phases. In a phase every thread plays its acts as fast as
it can, all on the same keys, ids and deliveries, so that nearly every act meets another one.
Between two phases all stand still, and the store's clock moves on by an hour: leases, windows, ETAs
and claims lapse there, and the acts of the next phase race for what they left.

Half of the keys have lanes and merged calls beside everything else; on one in four, most calls
follow another one whose holder dies.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from celery_unique.stores.base import (
    Acquired,
    Claim,
    Finish,
    Finished,
    Held,
    LockStore,
    Orphan,
    Push,
    Start,
    Started,
)
from celery_unique.stores.record import State, letters

from .checker import Operation
from .record_model import Timed

HOUR = 3_600_000
#: Deadlines end at half past, ETAs at quarter past: no sum of them falls on a full hour.
LEASES = (HOUR // 2, HOUR // 2, 3 * HOUR // 2, 5 * HOUR // 2)
DELAYS = (0, 0, 0, 5 * HOUR // 4)
PHASES = 4
#: What is played on each key of a round, which is the last letter of its name.
ANY, COLLECTS, FOLLOWS = "0", "1", "2"
KINDS = (ANY, COLLECTS, FOLLOWS, COLLECTS)
KEYS = len(KINDS)
IDS = tuple("abcde")
DELIVERIES = ("d1", "d2", "d3")
REAPERS = ("r1", "r2")
#: Only a process that is gone makes the others wait this long.
PATIENCE_S = 120.0

UNTIL_DONE = letters(["pending", "scheduled", "available", "active", "retryable"])
STATES = (
    *(UNTIL_DONE,) * 4,
    letters(State),
    letters(["pending", "scheduled", "available"]),
    letters(["active", "completed"]),
)
STRATEGIES = (
    *("ignore",) * 4,
    *("replace", "replace", "rerun", "rerun", "reject", "replace_except_schedule"),
)
KEEPING = ("ignore", "ignore", "reject")
#: On keys with lanes and merged calls, three calls in four are of these.
COLLECTING = ("queue", "merge")
#: No task that has ended takes values: the policy refuses such states.
MERGING_STATES = tuple(states for states in STATES if not set(states) & set("cdx"))
#: A payload holds the values of a few calls.
MERGE_MAX_BYTES = 60
ENDS = (State.COMPLETED, State.COMPLETED, State.DISCARDED, State.CANCELLED)

#: How often each act is played.
WEIGHTS = {
    "acquire": 26,
    "publish": 10,
    "confirm": 9,
    "give_back": 5,
    "help": 4,
    "cancel": 4,
    "release": 2,
    "start": 16,
    "renew": 7,
    "retry": 4,
    "finish": 12,
    "settle": 6,
    "forget": 3,
    "follow": 3,
    "followers": 2,
    "complete_follower": 3,
    "reap": 5,
    "promote": 6,
    "read": 5,
    "mark": 2,
}
#: On a key with lanes and merged calls.
COLLECTING_WEIGHTS = {
    **WEIGHTS,
    "start": 10,
    "cancel": 2,
    "complete_follower": 1,  # all of these empty a lane
    "finish": 24,
    "reap": 16,
    "unmerge": 4,
    "parked": 3,
}
#: On a key whose calls follow others: few tasks start, so that most holders die.
FOLLOWING_WEIGHTS = {
    **WEIGHTS,
    "acquire": 40,
    "start": 4,
    "cancel": 1,
    "give_back": 1,
    "finish": 4,
    "complete_follower": 1,
    "reap": 20,
    "followers": 6,
}
CALLING = {"finish", "reap"}
FIRE_AND_FORGET = {"confirm", "retry", "settle", "forget"}

Played = tuple[str, Operation]  # the key, and what was done with it


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is played, and by how many."""

    acts: int
    processes: int = 4
    threads: int = 2
    seed: int = 1

    @property
    def players(self) -> int:
        return self.processes * self.threads

    @property
    def per_phase(self) -> int:
        """Acts of one thread: some 60 on each key."""
        return max(1, 60 * KEYS // self.players)

    @property
    def rounds(self) -> int:
        return -(-self.acts // (self.players * self.per_phase * PHASES))


class Player:
    """One thread: chooses acts, plays them on the store and records them."""

    def __init__(self, store: LockStore, rng: random.Random, name: str) -> None:
        self._store = store
        self._rng = rng
        self._name = name
        self._played: list[Played] = []
        self._unfinished: list[tuple[str, str, tuple[Any, ...], int, int]] = []
        self._number = 0
        self._last_token = 0
        self._weights = {
            kind: dict(weights)
            for kind, weights in (
                (ANY, WEIGHTS),
                (COLLECTS, COLLECTING_WEIGHTS),
                (FOLLOWS, FOLLOWING_WEIGHTS),
            )
        }
        if not hasattr(store, "begin_publish") or hasattr(store, "shard_of"):
            # Not the broker's server; of a cluster, the queue is on another one.
            for acts in self._weights.values():
                del acts["publish"]

    def play(self, keys: list[str], number: int, phase_ms: int) -> None:
        for _ in range(number):
            key = self._rng.choice(keys)
            weights = self._weights[key[-1]]
            act = self._rng.choices(list(weights), list(weights.values()))[0]
            self._play(key, act, getattr(self, f"_{act}")(key), phase_ms)
            if act in FIRE_AND_FORGET and self._rng.random() < 0.5:
                self._flush(phase_ms)
        self._flush(phase_ms)

    def taken(self) -> list[Played]:
        played, self._played = self._played, []
        return played

    def _play(self, key: str, act: str, given: tuple[Any, ...], phase_ms: int) -> None:
        wall, called = self._clock_ms(), time.monotonic_ns()
        reply = self._reply(key, act, given)
        if act in FIRE_AND_FORGET:  # it takes effect at some time before the next flush
            self._unfinished.append((key, act, given, wall, called))
            return
        self._record(key, act, given, reply, wall, called, phase_ms)
        if act == "start" and reply.token:
            self._last_token = reply.token
        if (act == "promote" and reply == "publish") or (act in CALLING and calls(reply)):
            # Their moment of creation is seen before much depends on it.
            self._play(key, "read", (), phase_ms)
        if act == "promote" and reply == "publish":  # the others follow it
            self._play(key, "followers", (given[0],), phase_ms)
        if act == "reap":  # its reaper promotes what it was given, and most claims lapse otherwise
            for orphan in reply:
                if orphan.called is None and self._chance(0.7):
                    promoted = (orphan.follower_id, given[0], HOUR // 2, self._lease())
                    self._play(key, "promote", promoted, phase_ms)
        if isinstance(reply, Acquired) and reply.outcome == "merged" and self._chance(0.6):
            self._play(key, "unmerge", (given[0].task_id,), phase_ms)  # as by a call that raises

    def _reply(self, key: str, act: str, given: tuple[Any, ...]) -> Any:
        if act == "publish":
            [reply] = self._store.begin_publish([(key, *given)])()  # type: ignore[attr-defined]
            return reply
        if act == "renew":
            [reply] = self._store.renew(given)
            return reply
        if act == "read":
            return self._store.read(key)[0]
        if act == "release":
            return self._store.release(key, given[0])
        return getattr(self._store, act)(key, *given)

    def _flush(self, phase_ms: int) -> None:
        if self._unfinished:
            self._store.flush()
            for key, act, given, wall, called in self._unfinished:
                self._record(key, act, given, None, wall, called, phase_ms)
            self._unfinished.clear()

    def _record(
        self,
        key: str,
        act: str,
        given: tuple[Any, ...],
        reply: Any,
        wall: int,
        called: int,
        phase_ms: int,
    ) -> None:
        returned = time.monotonic_ns()
        if isinstance(reply, Exception):
            raise reply
        timed = Timed(given, phase_ms, wall, self._clock_ms())
        self._played.append((key, Operation(act, timed, reply, called, returned, self._name)))

    def _clock_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._store.clock_offset_ms

    # -- arguments ------------------------------------------------------------

    def _id(self) -> str:
        return self._rng.choice(IDS)

    def _lease(self) -> int:
        return self._rng.choice(LEASES)

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _claim(self, key: str, **fields: Any) -> Claim:
        states = self._rng.choice(STATES)
        task_id = self._id()
        given: dict[str, Any] = {
            "on_conflict": self._rng.choice(STRATEGIES),
            "parent": self._id() if self._chance(0.1) else "",
            "max_wait_ms": 5 * HOUR // 4 if self._chance(0.1) else 0,
            "window_ms": self._lease() if self._chance(0.2) else 0,
            "delay_ms": self._rng.choice(DELAYS),
            "keep": "".join(letter for letter in states if letter in "cdx"),
            "arguments": "other" if self._chance(0.05) else "",
            "again": self._chance(0.1),
            "join": f"message of {task_id}" if self._chance(0.25) else "",
            "canvas": self._chance(0.1),
        }
        given |= fields
        if follows(key):
            given["join"] = f"message of {task_id}" if self._chance(0.8) else ""
            given["on_conflict"] = "ignore"
        if collects(key) and self._chance(0.75):
            given["on_conflict"] = self._rng.choice(COLLECTING)
            given["limit"] = self._rng.choice((1, 1, 2))
            if given["on_conflict"] == "queue":
                states = self._rng.choice(STATES[:-2])
                given["join"] = f"message of {task_id}"
                given["max_queue"] = self._rng.choice((0, 0, 2))
            else:
                states = self._rng.choice(MERGING_STATES)
                self._number += 1
                values = f'{{"n":["{self._name}-{self._number}"]}}'
                given |= {"keep": "", "arguments": "", "merge": values}
                given["merge_max_bytes"] = MERGE_MAX_BYTES
        elif collects(key):
            # None of these replaces a task, whose payload Redis would keep until it expires.
            given["parent"], given["on_conflict"] = "", self._rng.choice(KEEPING)
        return Claim(task_id, "shop.rebuild", states, HOUR // 2, **given)

    def _acquire(self, key: str) -> tuple[Any, ...]:
        return (self._claim(key),)

    def _publish(self, key: str) -> tuple[Any, ...]:
        self._number += 1
        attempt = f"{self._name}-{self._number}"
        # The message has its ETA already, and this attempt is never repeated here.
        on_conflict = self._rng.choice(STRATEGIES[:-1])
        claim = self._claim(key, on_conflict=on_conflict, max_wait_ms=0, again=False)
        return claim, Push("celery", self._lease(), attempt, "{", "", "}")

    def _confirm(self, key: str) -> tuple[Any, ...]:
        return self._id(), self._lease()

    def _give_back(self, key: str) -> tuple[Any, ...]:
        return self._id(), self._lease()

    def _help(self, key: str) -> tuple[Any, ...]:
        return self._id(), HOUR // 2

    def _cancel(self, key: str) -> tuple[Any, ...]:
        return self._id(), self._lease()

    def _release(self, key: str) -> tuple[Any, ...]:
        return (self._id() if self._chance(0.7) else None, 0)

    def _start(self, key: str) -> tuple[Any, ...]:
        keep = self._rng.choice(("", "", "c"))
        delivery = self._rng.choice(DELIVERIES)
        run_lease = HOUR // 2
        start = Start(self._id(), delivery, "shop.rebuild", self._lease(), run_lease, HOUR // 2)
        start.keep, start.merge = keep, collects(key)
        return (start,)

    def _renew(self, key: str) -> tuple[Any, ...]:
        copies = self._chance(0.2)
        if self._chance(0.5):
            delivery = self._rng.choice(DELIVERIES)
            held = Held(key, self._id(), delivery, self._lease(), HOUR // 2, copies)
            held.merge = collects(key)
            return (held,)
        waits_as = self._rng.choice(("", *DELIVERIES))
        held_ms = HOUR // 2 if self._chance(0.4) else 0
        held = Held(key, self._id(), "", self._lease(), 0, copies, waits_as, held_ms)
        held.returned, held.merge = self._chance(0.2), collects(key)
        return (held,)

    def _retry(self, key: str) -> tuple[Any, ...]:
        return self._id(), self._rng.choice(DELIVERIES), self._lease(), self._chance(0.3)

    def _end(self, key: str) -> Finish:
        return Finish(
            self._id(),
            self._rng.choice(DELIVERIES),
            self._rng.choice(ENDS),
            HOUR // 2,
            self._lease(),
            self._chance(0.4),
            HOUR // 2,
            self._last_token if self._chance(0.2) else 0,
            self._chance(0.05),
            collects(key),
            again=self._chance(0.1),
        )

    def _finish(self, key: str) -> tuple[Any, ...]:
        return (self._end(key),)

    def _settle(self, key: str) -> tuple[Any, ...]:
        return self._end(key), self._chance(0.3)

    def _forget(self, key: str) -> tuple[Any, ...]:
        return (self._id(),)

    def _follow(self, key: str) -> tuple[Any, ...]:
        claim = self._claim(key)
        claim.join = f"message of {claim.task_id}"
        return claim, self._id()

    def _followers(self, key: str) -> tuple[Any, ...]:
        return (self._rng.choice((None, *IDS)),)

    def _complete_follower(self, key: str) -> tuple[Any, ...]:
        return (self._id(),)

    def _reap(self, key: str) -> tuple[Any, ...]:
        return self._rng.choice(REAPERS), HOUR // 2

    def _promote(self, key: str) -> tuple[Any, ...]:
        return self._id(), self._rng.choice(REAPERS), HOUR // 2, self._lease()

    def _read(self, key: str) -> tuple[Any, ...]:
        return ()

    def _mark(self, key: str) -> tuple[Any, ...]:
        return (self._id(),)

    def _unmerge(self, key: str) -> tuple[Any, ...]:
        return (self._id(),)

    def _parked(self, key: str) -> tuple[Any, ...]:
        return ()


# -- many of them -------------------------------------------------------------

OpenStore = Callable[[], LockStore]


class PhaseClock:
    """The machine's clock when a phase began, the same for all players: see ``record_model``."""

    def __init__(self, began_ms: Any) -> None:
        self._began_ms = began_ms

    def __call__(self) -> None:
        self._began_ms.value = time.time_ns() // 1_000_000

    def at(self, phase: int) -> int:
        return int(self._began_ms.value) + phase * HOUR


def record_in_threads(store: LockStore, plan: Plan) -> dict[str, list[Operation]]:
    """The history of each key, of a store that lives in one process."""
    clock = PhaseClock(multiprocessing.RawValue("q"))
    barrier = threading.Barrier(plan.threads, action=clock, timeout=PATIENCE_S)
    return _by_key(_play_in_threads(store, plan, 0, barrier, clock))


def record_in_processes(open_store: OpenStore, plan: Plan) -> dict[str, list[Operation]]:
    """The history of each key; ``open_store`` is called once in each process, and pickled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spec.linearizability.stores"])
    clock = PhaseClock(context.RawValue("q"))
    barrier = context.Barrier(plan.players, action=clock, timeout=PATIENCE_S)
    pipes, processes = [], []
    for number in range(plan.processes):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(theirs, open_store, plan, number, barrier, clock), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    played: list[Played] = []
    for mine in pipes:
        answer = mine.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        played += answer
    for process in processes:
        process.join(timeout=PATIENCE_S)
    return _by_key(played)


def _by_key(played: list[Played]) -> dict[str, list[Operation]]:
    histories: dict[str, list[Operation]] = {}
    for key, operation in played:
        histories.setdefault(key, []).append(operation)
    for history in histories.values():
        history.sort(key=lambda operation: operation.called)
    return histories


def _serve(
    pipe: Connection,
    open_store: OpenStore,
    plan: Plan,
    process: int,
    barrier: Any,
    clock: PhaseClock,
) -> None:
    try:
        store = open_store()
        pipe.send(_play_in_threads(store, plan, process, barrier, clock))
        store.close()
    except Exception:
        barrier.abort()  # the others do not wait for this one
        pipe.send(traceback.format_exc())


def _play_in_threads(
    store: LockStore, plan: Plan, process: int, barrier: Any, clock: PhaseClock
) -> list[Played]:
    # Threads of one process change places often: between two acts is not often enough.
    sys.setswitchinterval(1e-5)
    played: list[Played] = []
    failed: list[BaseException] = []

    def run(thread: int) -> None:
        rng = random.Random(f"{plan.seed}/{process}/{thread}")
        player = Player(store, rng, f"{process}.{thread}")
        try:
            for keys, phase in _schedule(plan):
                barrier.wait()  # all have finished the last phase
                store.clock_offset_ms = phase * HOUR
                barrier.wait()  # all have moved the clock
                player.play(keys, plan.per_phase, clock.at(phase))
        except BaseException as error:
            failed.append(error)
            barrier.abort()
        played.extend(player.taken())

    threads = [threading.Thread(target=run, args=(n,)) for n in range(plan.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(0.005)
    failed.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if failed:
        raise failed[0]
    return played


def _schedule(plan: Plan) -> Iterator[tuple[list[str], int]]:
    for number in range(plan.rounds):
        keys = [_key(f"{plan.seed}/{number}", n) for n in range(KEYS)]
        for phase in range(PHASES):
            yield keys, phase


def _key(name: str, number: int) -> str:
    digest = hashlib.sha256(f"{name}/{number}".encode()).hexdigest()
    return f"1:{digest[:-1]}{KINDS[number]}"


def collects(key: str) -> bool:
    """Whether lanes and merged calls are played on it."""
    return key.endswith(COLLECTS)


def follows(key: str) -> bool:
    """Whether most calls on it follow another one."""
    return key.endswith(FOLLOWS)


def calls(reply: list[Orphan] | Finished) -> bool:
    """Whether parked calls have become tasks by this act."""
    if isinstance(reply, Finished):
        return bool(reply.called)
    return any(orphan.called for orphan in reply)


def outcome_of(operation: Operation) -> str:
    """The kind of reply, for the coverage table."""
    reply = operation.reply
    if isinstance(reply, Acquired):
        how = ", replaces" if reply.replaced else ""
        return reply.outcome + how + (", succeeds" if reply.after else "")
    if operation.act in CALLING and calls(reply):
        return "calls"
    if isinstance(reply, Started) and reply.payload:
        return f"{reply.verdict}, with a payload"
    for name in ("verdict", "kind"):
        if hasattr(reply, name):
            return str(getattr(reply, name))
    if isinstance(reply, list):
        return "some" if reply else "none"
    if isinstance(reply, (str, bool)) or reply is None:
        return str(reply)
    return "more than 0" if isinstance(reply, int) and reply else "0" if reply == 0 else "a record"
