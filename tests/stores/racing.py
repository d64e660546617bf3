"""Many processes that do the same thing at the same moment, round after round.

``Racers`` keeps the processes alive over all races, because starting them takes longer than
racing. What they do is a *racer*: a function of a module that can be imported, which is
called once in each process with the race's arguments and the process's number and returns
what to do in a round. So the same harness races a store directly and, with another racer,
calls through the public API.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import redis

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import GRACE, claim, finish, start

PROCESSES = 16
ROUNDS = 1000
#: From the moment that the last process has come to the common start. Long enough for all of
#: them to wake up and go to sleep again until then: woken one by one, they would also call so.
HEAD_START_NS = 2_000_000
#: Far longer than a round: only a process that is gone makes the others wait this long.
PATIENCE_S = 60.0

#: What racers import, and what is imported when they begin.
PRELOADED = [
    "tests.stores.racing",
    "tests.support.app",
    "celery.app.amqp",
    "celery.app.events",
    "celery.backends.cache",
    "celery_unique.stores.redis",
    "celery_unique.stores.sql",
    "psycopg",
]

Round = Callable[[int], Any]
Racer = Callable[..., Round]


class Call(NamedTuple):
    """One process's call in one round; the clock is the same in all processes (Linux)."""

    began_ns: int
    ended_ns: int
    answer: Any


class Attempt(NamedTuple):
    """The answer to a call that wants the key."""

    created: bool
    holder: str  # the caller's own id when it was created


class RacerFailed(AssertionError):
    """A process raised; the message is its traceback."""


class Racers:
    """The processes. A context manager."""

    def __init__(self, processes: int = PROCESSES) -> None:
        # Sixteen interpreters that import all of this take longer than many a race: one does,
        # which has no threads and no connections, and is forked.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        starting = _Starting(context.RawValue("q"))
        self._barrier = context.Barrier(processes, action=starting, timeout=PATIENCE_S)
        self._pipes = []
        self._processes = []
        for number in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._barrier, starting, number), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def race(self, racer: Racer, *arguments: Any, rounds: int = ROUNDS) -> list[list[Call]]:
        """The calls of every round, in the order of the processes."""
        for pipe in self._pipes:
            pipe.send((racer, arguments, rounds))
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self._barrier.reset()
            # The others only report that the barrier broke.
            failures.sort(key=lambda failure: "BrokenBarrierError" in failure)
            raise RacerFailed(failures[0])
        return [list(calls) for calls in zip(*answers, strict=True)]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the process sees the end of its orders
        for process in self._processes:
            process.join(timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class _Starting:
    """The moment at which a round begins, set by the last process that is ready for it."""

    def __init__(self, at_ns: Any) -> None:
        self._at_ns = at_ns

    def __call__(self) -> None:
        self._at_ns.value = time.monotonic_ns() + HEAD_START_NS

    def sleep_until(self) -> None:
        time.sleep(max(0, self._at_ns.value - time.monotonic_ns()) / 1e9)


def _serve(pipe: Connection, barrier: Any, starting: _Starting, number: int) -> None:
    _stay_on_one_processor(number)
    while True:
        try:
            racer, arguments, rounds = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_run(racer(*arguments, number), barrier, starting, rounds))
        except Exception:
            barrier.abort()  # nobody waits for this process any longer
            pipe.send(traceback.format_exc())
        while _connected:
            _connected.pop().close()


def _stay_on_one_processor(number: int) -> None:
    """Spread evenly: left alone, all may queue for one processor and take turns on it."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def _run(play: Round, barrier: Any, starting: _Starting, rounds: int) -> list[Call]:
    calls = []
    for number in range(rounds):
        barrier.wait()
        starting.sleep_until()
        began = time.monotonic_ns()
        answer = play(number)
        calls.append(Call(began, time.monotonic_ns(), answer))
    return calls


# -- racers -------------------------------------------------------------------


def key_of(race: str, number: int | str) -> str:
    return "1:" + hashlib.sha256(f"{race}/{number}".encode()).hexdigest()


_connected: list[LockStore] = []


def connected(url: str) -> LockStore:
    """A store that has its connection before the first round begins; closed after the race."""
    store = open_store(url, timeout_s=30.0)
    store.ping()
    _connected.append(store)
    return store


def acquire_racer(url: str, race: str, process: int) -> Round:
    """In every round all processes want the same new key."""
    store = connected(url)

    def play(number: int) -> Attempt:
        mine = f"r{number}-p{process}"
        reply = store.acquire(key_of(race, number), claim(mine))
        return Attempt(reply.outcome == "created", reply.holder.task_id if reply.holder else mine)

    return play


def racy_acquire_racer(url: str, race: str, process: int) -> Round:
    """As ``acquire_racer`` on a store that looks first and writes then, on Redis."""
    client = redis.Redis.from_url(url, decode_responses=True)
    client.ping()

    def play(number: int) -> Attempt:
        mine, key = f"r{number}-p{process}", key_of(race, number)
        holder = client.get(key)
        if holder is None:
            client.set(key, mine, px=GRACE)
        return Attempt(holder is None, str(holder or mine))

    return play


def start_racer(url: str, race: str, process: int) -> Round:
    """In every round all processes are delivered the same message of one key.

    The answer is the token, or None. The delivery that ran ends its task when the next round
    begins: every other process has asked by then.
    """
    store, key = connected(url), key_of(race, "one key")
    ran: list[str] = []

    def play(number: int) -> int | None:
        while ran:
            ended = finish(ran.pop(), f"p{process}", mark_ms=1)
            assert store.finish(key, ended).verdict == "ended"
            store.settle(key, ended, mark_done=False)
        task_id = f"r{number}"
        started = store.start(key, start(task_id, f"p{process}"))
        if started.verdict != "run":
            assert started.verdict == "wait", started
            return None
        ran.append(task_id)
        return started.token

    return play


def token_racer(url: str, race: str, process: int) -> Round:
    """All processes start tasks of their own on one key; the answer is the token."""
    store, key = connected(url), key_of(race, "one key")

    def play(number: int) -> int:
        task_id = f"r{number}-p{process}"
        started = store.start(key, start(task_id, f"p{process}"))
        assert started.verdict == "run"
        return started.token

    def play_and_finish(number: int) -> int:
        if number:
            store.finish(key, finish(f"r{number - 1}-p{process}", f"p{process}"))
        return play(number)

    return play_and_finish


def failing_racer(process: int) -> Round:
    """One process fails while the others wait for it."""

    def play(number: int) -> None:
        if process == 3:
            raise RuntimeError("the lights went out")

    return play


# -- what came of it ----------------------------------------------------------


def wrong_rounds(rounds: list[list[Call]]) -> list[str]:
    """What is wrong with each round that has not one winner whom all others name."""
    return [
        f"round {number}: {problem}"
        for number, calls in enumerate(rounds)
        for problem in _problems([call.answer for call in calls])
    ]


def _problems(attempts: list[Attempt]) -> Iterator[str]:
    winners = [attempt.holder for attempt in attempts if attempt.created]
    if len(winners) != 1:
        yield f"{len(winners)} winners: {winners}"
    named = {attempt.holder for attempt in attempts if not attempt.created}
    if not named <= set(winners):
        yield f"losers name {sorted(named)}, the winner is {winners}"


@dataclass(frozen=True)
class Overlap:
    """How far the calls of a round really were at once."""

    rounds: int
    overlapped: int  # rounds in which at least two calls were under way at the same moment
    at_once: float  # median over the rounds of the most calls under way at one moment

    @property
    def share(self) -> float:
        return self.overlapped / self.rounds

    def __str__(self) -> str:
        return (
            f"calls overlapped in {self.overlapped} of {self.rounds} rounds ({self.share:.1%}), "
            f"up to {self.at_once:g} at once in the median round"
        )


def overlap_of(rounds: list[list[Call]]) -> Overlap:
    most = [_most_at_once(calls) for calls in rounds]
    return Overlap(len(rounds), sum(number > 1 for number in most), statistics.median(most))


def _most_at_once(calls: list[Call]) -> int:
    # An end sorts before a beginning of the same nanosecond: touching is not overlapping.
    moments = [(call.began_ns, 1) for call in calls] + [(call.ended_ns, -1) for call in calls]
    at_once = most = 0
    for _, change in sorted(moments):
        at_once += change
        most = max(most, at_once)
    return most


def tokens_out_of_order(calls: list[Call]) -> list[tuple[Call, Call]]:
    """Pairs of calls of which the later one, by the clock, got no larger token."""
    wrong = []
    ended = sorted(calls, key=lambda call: call.ended_ns)
    largest: Call | None = None
    position = 0
    for call in sorted(calls, key=lambda call: call.began_ns):
        while ended[position].ended_ns < call.began_ns:
            if largest is None or ended[position].answer > largest.answer:
                largest = ended[position]
            position += 1
        if largest is not None and largest.answer >= call.answer:
            wrong.append((largest, call))
    return wrong
