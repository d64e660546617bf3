"""Lanes with real workers, which are killed. ``make test-lanes`` runs the sizes of the docs:
``CELERY_UNIQUE_LANES`` is the number of tasks of the largest test."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import chain, chord

import celery_unique
from celery_unique.config.app_state import state_of
from tests.support.redis import RedisServer
from tests.support.redis_journal import JOURNAL_ARGS, RedisJournal
from tests.support.waiting import eventually

TASKS = int(os.environ.get("CELERY_UNIQUE_LANES", "0"))
FULL = TASKS > 0
MODULE = "tests.workers.apps.lanes"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if FULL else 300)]


class Hall:
    """The app in this process, its workers, and the journal of the bodies."""

    def __init__(
        self, url: str, directory: Path, start_worker: Callable[..., Any], **env: str
    ) -> None:
        self.journal = directory / "journal"
        self.journal.touch()
        self.env = {
            **env,
            "LANES_REDIS": url,
            "LANES_JOURNAL": str(self.journal),
            "LANES_CHECKED": "1",
        }
        os.environ.update(self.env)
        sys.modules.pop(MODULE, None)
        self.tasks = importlib.import_module(MODULE)
        self.app = self.tasks.app
        self._start_worker = start_worker
        self.workers: list[Any] = []
        self.killed: dict[int, float] = {}
        self.stopped: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.lease_s = self.tasks.RUN_LEASE_S

    def work(self, concurrency: int = 4, pool: str = "threads", **options: Any) -> Any:
        """A worker whose bodies run in its main process, and are killed with it."""
        options = {"pool": pool, "concurrency": concurrency, "env": self.env, **options}
        worker = self._start_worker(MODULE, **options)
        self.workers.append(worker)
        return worker

    def kill(self, worker: Any) -> None:
        self.workers.remove(worker)
        worker.kill()
        self.killed[worker.pid] = time.monotonic()

    def pause(self, worker: Any, seconds: float) -> None:
        """SIGSTOP: bodies, renewals and all else of the worker stand still."""
        worker.sigstop()
        began = time.monotonic()
        time.sleep(seconds)
        self.stopped[worker.pid].append((began, time.monotonic()))
        worker.sigcont()

    def was_stopped(self, body: dict[str, Any]) -> bool:
        """Whether the lease of the body may have lapsed, since its worker could not renew it."""
        return any(
            began < body["until"] and ended > body["at"] and ended - began > self.lease_s / 2
            for began, ended in self.stopped[body["pid"]]
        )

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def ended(self) -> set[str]:
        return {event["id"] for event in self.events() if event["what"] == "end"}

    def running(self) -> set[tuple[int, str]]:
        """Bodies in workers that live: also those of calls that a killed producer had just made."""
        began, ended = (
            {(event["pid"], event["id"]) for event in self.events() if event["what"] == what}
            for what in ("begin", "end")
        )
        return {body for body in began - ended if body[0] not in self.killed}

    def left(self) -> list[str]:
        """Keys with parked calls, or calls whose publish is not confirmed."""
        state_of(self.app).store.flush()
        return [key for key, record in state_of(self.app).store.walk() if record.following]


@contextmanager
def opened(
    url: str, directory: Path, start_worker: Callable[..., Any], **env: str
) -> Iterator[Hall]:
    before = dict(os.environ)
    hall = Hall(url, directory, start_worker, **env)
    yield hall
    os.environ.clear()
    os.environ.update(before)
    state_of(hall.app).store.close()


@pytest.fixture
def hall(redis_url: str, tmp_path: Path, start_worker: Callable[..., Any]) -> Iterator[Hall]:
    with opened(redis_url, tmp_path, start_worker) as hall:
        yield hall


@pytest.fixture
def journal(start_server: Callable[..., Any]) -> RedisJournal:
    """Of a broker: it shows which messages kombu has lost."""
    server = start_server(RedisServer, append_only=True, extra_args=JOURNAL_ARGS)
    return RedisJournal(server, 0, "celery", "no key says that a task has ended")


@pytest.fixture
def journaled_hall(
    journal: RedisJournal, tmp_path: Path, start_worker: Callable[..., Any]
) -> Iterator[Hall]:
    with opened(journal.server.url, tmp_path, start_worker) as hall:
        yield hall


def most_at_a_time(hall: Hall) -> dict[str, int]:
    """Of each lane: how many bodies with live leases ran at the same time.

    A body of a killed process ended then. One whose lease has lapsed is left out: it says so at
    its end, or its process was stopped and then killed. So is one that runs a second time, since
    its worker was killed between its end, which gave the next call its turn, and its result: W3 in
    the failure modes.
    """
    bodies: dict[tuple[int, str], dict[str, Any]] = {}
    marks: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in hall.events():
        if event["what"] == "begin":
            bodies[event["pid"], event["id"]] = {**event, "until": None, "mine": True}
        else:
            body = bodies[event["pid"], event["id"]]
            body.update(until=event["at"], mine=event["mine"])
            if not event["mine"]:
                assert hall.was_stopped(body), f"its lease lapsed while its worker lived: {body}"
    killed_behind_its_end = {
        task_id: hall.killed[pid]
        for (pid, task_id), body in bodies.items()
        if pid in hall.killed
        and body["until"] is not None
        and hall.killed[pid] - body["until"] < hall.lease_s
    }
    for (pid, task_id), body in bodies.items():
        if killed_behind_its_end.get(task_id, body["at"]) < body["at"]:
            continue
        until = hall.killed[pid] if body["until"] is None else body["until"]
        if body["until"] is None and hall.was_stopped({**body, "until": until}):
            continue
        if body["mine"]:
            marks[body["lane"]] += [(body["at"], 1), (until, -1)]
    most = {}
    for lane, changes in marks.items():
        now = most[lane] = 0
        for _, change in sorted(changes):
            now += change
            most[lane] = max(most[lane], now)
    return most


def begins(hall: Hall) -> dict[str, list[int]]:
    """Of each lane: the numbers of its calls, in the order in which their bodies first began."""
    order: dict[str, list[int]] = defaultdict(list)
    seen = set()
    for event in sorted(hall.events(), key=lambda event: event["at"]):
        if event["what"] == "begin" and event["id"] not in seen:
            seen.add(event["id"])
            order[event["lane"]].append(event["n"])
    return order


#: A producer calls its lanes in turn, and prints the number, the id and the outcome of every call
#: that was accepted. Another one continues behind the call that may have been accepted last.
PRODUCER = """
import random, sys
from tests.workers.apps.lanes import late, late_two
first, last, begin, end = map(int, sys.argv[1:])
chance = random.Random(begin)
for n in range(begin, end):
    lane = first + n % (last - first)
    task = late_two if lane % 2 else late  # odd lanes run two at a time
    result = task.delay(f"lane{lane}", n // (last - first), chance.uniform(0, 0.1))
    print(n, result.id, result.outcome, flush=True)
"""


class Producer:
    """Calls some of the lanes from a process, and from another one when that is killed."""

    def __init__(self, hall: Hall, first: int, last: int, number: int) -> None:
        self._hall, self._lanes, self._number = hall, (first, last), number
        self._begin = 0
        self.accepted: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        arguments = (*self._lanes, self._begin, self._number)
        self._out = self._hall.journal.parent / f"{self._lanes[0]}.{self._begin}"
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PRODUCER, *map(str, arguments)],
                stdout=out,
                env={**os.environ, **self._hall.env, "PYTHONPATH": str(Path(__file__).parents[2])},
                text=True,
            )

    def _read(self) -> None:
        lines = [line.split() for line in self._out.read_text().splitlines()]
        self.accepted.update({line[1]: line[2] for line in lines if len(line) == 3})
        if lines:
            self._begin = int(lines[-1][0]) + 1

    def kill(self) -> None:
        """The call that it was making may have been accepted, or not."""
        assert self._process is not None
        if self._process.poll() is not None:
            return
        self._process.kill()
        self._process.wait()
        self._read()
        self._begin += 1
        self.start()

    def ended(self) -> bool:
        assert self._process is not None
        if self._process.poll() is None:
            return False
        assert self._process.returncode == 0
        self._read()
        return True


def until_all_have_ended(
    hall: Hall,
    accepted: Callable[[], set[str]],
    lost: set[str],
    timeout: float,
    more_than: int | None = None,
) -> None:
    """Wait for the end of every call, or of more than so many. Those whose messages kombu has lost
    are added to ``lost``.

    Redis hands a message to a worker before kombu records that. If the worker is killed in between,
    the message is in no list and in no record, with any library and with none. The lane must go on
    without it: a worker finds the stale task after a minute.
    """
    ends = time.monotonic() + timeout
    seen, quiet_since = 0, time.monotonic()
    with redis.Redis.from_url(hall.env["LANES_REDIS"]) as broker:
        while left := accepted() - hall.ended() - lost:
            if more_than is not None and len(hall.ended()) > more_than:
                break
            assert time.monotonic() < ends, f"{len(left)} calls have not ended"
            time.sleep(0.1)
            now, events = time.monotonic(), len(hall.events())
            if events != seen or broker.llen("celery") or broker.hlen("unacked"):
                seen, quiet_since = events, now
            elif now - quiet_since > 3 * hall.lease_s:
                # Every message that exists is in the store: parked, or of a call that had its turn
                # and is published again after its grace. The others do not exist.
                store = state_of(hall.app).store
                stored: set[str] = set()
                for key, record in store.walk():
                    lane = record.following.lane if record.following is not None else None
                    if lane is not None:
                        stored |= {*store.parked(key), *lane.called}
                lost |= left - stored
                quiet_since = now


# A lane goes on a minute after kombu has lost the message of its task, which may happen again.
@pytest.mark.timeout(0 if FULL else 600)
def test_no_lane_runs_more_than_its_limit_and_none_is_lost_when_processes_are_killed(
    journal, journaled_hall, report
):
    hall = journaled_hall
    number, lanes, workers, producers = (TASKS, TASKS // 20, 10, 5) if FULL else (240, 12, 3, 2)
    faults = max(10, number // 200)
    chance = random.Random(7)
    share = lanes // producers
    callers = [
        Producer(hall, n * share, (n + 1) * share, number // producers) for n in range(producers)
    ]
    for caller in callers:
        caller.start()
    for _ in range(workers):
        hall.work()
    done: Counter[str] = Counter()
    lost: set[str] = set()

    def accepted() -> set[str]:
        return {task_id for caller in callers for task_id in caller.accepted}

    began = time.monotonic()
    try:
        for fault in range(faults):
            seen = len(hall.ended())
            eventually(
                lambda seen=seen: (
                    len(hall.ended()) > seen or all(caller.ended() for caller in callers)
                ),
                timeout=120,
            )
            until_all_have_ended(hall, accepted, lost, timeout=400, more_than=seen)
            if fault % 5 == 4:
                hall.pause(chance.choice(hall.workers), chance.choice([0.3, hall.lease_s * 1.5]))
                done["stops"] += 1
            elif fault % 5 == 2:
                chance.choice(callers).kill()
                done["producers killed"] += 1
            else:
                hall.kill(chance.choice(hall.workers))
                hall.work()
                done["workers killed"] += 1
        eventually(lambda: all(caller.ended() for caller in callers), timeout=600)
        until_all_have_ended(hall, accepted, lost, timeout=1800 if FULL else 400)
        eventually(lambda: not hall.left() and not hall.running(), timeout=60)
    finally:
        for key, record in state_of(hall.app).store.walk():
            print("still recorded:", key, record)  # shown where the test fails
        print("without an end:", accepted() - hall.ended())
        for worker in hall.workers:
            print(*(line for line in worker.log().splitlines() if "stale" in line), sep="\n")

    most = most_at_a_time(hall)
    over = {
        lane: most_bodies
        for lane, most_bodies in most.items()
        if most_bodies > 1 + int(lane.removeprefix("lane")) % 2
    }
    whole = {(e["pid"], e["id"]) for e in hall.events() if e["what"] == "end" and e["mine"]}
    broken = {e["lane"] for e in hall.events() if (e["pid"], e["id"]) not in whole}
    singles = {
        lane: order
        for lane, order in begins(hall).items()
        if lane not in broken and not int(lane.removeprefix("lane")) % 2
    }
    in_order = [lane for lane, order in singles.items() if order == sorted(order)]
    runs = Counter(event["what"] for event in hall.events())
    lapsed = sum(not event.get("mine", True) for event in hall.events())
    queued = sum(outcome == "queued" for caller in callers for outcome in caller.accepted.values())
    report(
        f"lanes: {len(accepted())} tasks in {lanes} lanes, {workers} workers, {dict(done)}, "
        f"{queued} were parked: {len(accepted() - hall.ended() - lost)} lost, and {len(lost)} by "
        f"kombu in a worker that was killed; {len(over)} lanes with too many bodies, "
        f"{len(hall.left())} with calls left over, {runs['begin']} bodies began, {lapsed} of them "
        f"lost their lease in a stopped worker; {len(in_order)} of {len(singles)} lanes of one at "
        "a time without a broken body began in the order of admission; "
        f"{time.monotonic() - began:.0f} s"
    )
    assert over == {}
    assert len(in_order) == len(singles)
    swallowed = {life.task_id for life in journal.messages().values() if life.is_swallowed}
    assert lost - swallowed == set()


def test_lanes_without_faults_run_in_the_order_of_admission(hall, report):
    number, lanes = (5000, 250) if FULL else (120, 6)
    results = [hall.tasks.early.delay(f"lane{n % lanes}", n // lanes) for n in range(number)]

    for _ in range(3):
        hall.work()
    eventually(lambda: len(hall.ended()) == number, timeout=600 if FULL else 60)
    order = begins(hall)
    assert {lane: sorted(numbers) for lane, numbers in order.items()} == order
    assert set(most_at_a_time(hall).values()) == {1}
    eventually(lambda: not hall.left())
    parked = sum(result.outcome == "queued" for result in results)
    report(f"lanes: {number} tasks in {lanes} lanes, {parked} parked, all in order of admission")


def test_the_next_starts_within_the_run_lease_and_a_third_of_it(hall, report):
    rounds, parked = (50, 100) if FULL else (3, 10)
    hall.work(concurrency=1)
    late = []
    for turn in range(rounds):
        lane = f"lane{turn}"
        doomed = hall.work(concurrency=1, queues=["doomed"])
        first = hall.tasks.early.apply_async((lane, 0, 600), queue="doomed")
        eventually(lambda f=first: any(e["id"] == f.id for e in hall.events()), timeout=30)
        for n in range(1, parked + 1):
            assert hall.tasks.early.delay(lane, n).outcome == "queued"
        hall.kill(doomed)
        killed_at = hall.killed[doomed.pid]
        begun = eventually(
            lambda where=lane: [e for e in hall.events() if e["lane"] == where and e["n"] == 1],
            timeout=30,
        )
        late.append(begun[0]["at"] - killed_at)
        eventually(lambda where=lane: _ended(hall, where) == parked, timeout=60)
    lease = hall.tasks.RUN_LEASE_S
    report(
        f"lanes: the holder's worker was killed {rounds} times with {parked} calls parked: the "
        f"next began after {min(late):.2f} to {max(late):.2f} s, with a run lease of {lease:g} s"
    )
    # Beyond the lease and a third of it only the publish and the start.
    assert max(late) < lease * 4 / 3 + 1.0


@pytest.mark.server
@pytest.mark.parametrize("store", ["postgres", "sqlite", "mariadb", "sentinel", "cluster"])
def test_the_next_starts_on_every_store(redis_url, store, request, tmp_path, start_worker, report):
    """A run of lanes on each store, in which the holder's worker is killed."""
    store_url = request.getfixturevalue(f"{store}_url")
    with opened(redis_url, tmp_path, start_worker, LANES_STORE=store_url) as hall:
        doomed = hall.work(concurrency=1, queues=["doomed"])
        first = hall.tasks.early.apply_async(("lane", 0, 600), queue="doomed")
        eventually(hall.events, timeout=30)
        results = [hall.tasks.early.delay("lane", n) for n in range(1, 6)]
        assert {result.outcome for result in results} == {"queued"}
        hall.work(concurrency=2)

        hall.kill(doomed)

        assert [result.get(timeout=30) for result in results] == list(range(1, 6))
        assert begins(hall)["lane"] == list(range(6))
        assert most_at_a_time(hall) == {"lane": 1}
        [begun] = [event for event in hall.events() if event["what"] == "begin" and event["n"] == 1]
        after_s = begun["at"] - hall.killed[doomed.pid]
        report(f"lanes: on {store}, the next began {after_s:.2f} s after the kill")
        assert after_s < hall.lease_s * 4 / 3 + 1.0
        eventually(lambda: first.unique_key not in hall.left(), timeout=30)


@pytest.mark.server
def test_a_call_that_has_its_turn_while_the_broker_is_down_is_published_later(
    redis_url, start_server, tmp_path, start_worker
):
    broker = start_server(RedisServer, append_only=True)
    with opened(broker.url, tmp_path, start_worker, LANES_STORE=redis_url) as hall:
        hall.work(concurrency=2)
        first, *parked = [hall.tasks.gated.delay("lane", n) for n in range(4)]
        eventually(hall.events, timeout=30)

        broker.kill()
        Path(f"{hall.journal}.open").touch()
        eventually(lambda: first.id in hall.ended(), timeout=30)
        time.sleep(hall.lease_s)
        assert begins(hall)["lane"] == [0]
        broker.restart()

        eventually(lambda: {result.id for result in parked} <= hall.ended(), timeout=90)
        assert begins(hall)["lane"] == [0, 1, 2, 3]
        assert most_at_a_time(hall) == {"lane": 1}


def _ended(hall: Hall, lane: str) -> int:
    return sum(e["what"] == "end" and e["lane"] == lane for e in hall.events())


def test_a_chord_in_one_lane_completes(hall, report):
    members = 500 if FULL else 40
    for _ in range(2):
        hall.work()
    hall.app.set_current()

    began = time.monotonic()
    header = [hall.tasks.five.s("lane", n) for n in range(members)]
    result = chord(header)(hall.tasks.total.s())

    assert result.get(timeout=300 if FULL else 60) == sum(range(members))
    most = most_at_a_time(hall)["lane"]
    assert most <= 5
    report(
        f"lanes: a chord of {members} members in one lane of five completed in "
        f"{time.monotonic() - began:.1f} s, {most} bodies at a time"
    )


def resident_mb(worker: Any) -> float:
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_the_memory_of_a_worker_does_not_grow_with_parked_calls(hall, report):
    number, run = (50_000, 1000) if FULL else (1000, 100)
    worker = hall.work(concurrency=2)
    for n in range(100):  # its caches are filled
        hall.tasks.early.delay(f"warm{n % 5}", n)
    eventually(lambda: len(hall.ended()) == 100, timeout=60)
    hall.tasks.gated.delay("lane", 0)
    eventually(lambda: any(event["lane"] == "lane" for event in hall.events()))
    before = resident_mb(worker)

    for first in range(0, number, 1000):
        calls = [hall.tasks.gated.s("lane", n) for n in range(first + 1, first + 1001)]
        results = celery_unique.apply_many(calls)
        assert {result.outcome for result in results} == {"queued"}
    time.sleep(2 * hall.lease_s)  # rounds of renewals and of the reaper
    waiting = resident_mb(worker)
    Path(f"{hall.journal}.open").touch()
    eventually(lambda: _ended(hall, "lane") > run, timeout=120)
    running = resident_mb(worker)

    report(
        f"lanes: memory of a worker {before:.1f} MB; with {number} parked calls {waiting:.1f} MB; "
        f"after {run} of them {running:.1f} MB"
    )
    assert waiting - before < 4
    assert running - before < 8


def test_a_lane_whose_task_is_renewed_is_never_due(hall):
    hall.work(concurrency=2)
    store = state_of(hall.app).store
    first = hall.tasks.gated.delay("lane", 0)
    eventually(hall.events)
    second = hall.tasks.gated.delay("lane", 1)

    ends = time.monotonic() + 2.5 * hall.lease_s
    while time.monotonic() < ends:
        # A worker reaps keys that are due, and no others: waiting costs nothing.
        assert first.unique_key not in store.due()
        time.sleep(0.05)

    Path(f"{hall.journal}.open").touch()
    assert second.get(timeout=30) == 1


def test_a_chain_whose_links_share_a_lane_completes(hall):
    hall.work()
    hall.app.set_current()
    link = hall.tasks.early

    results = [
        chain(link.si("lane", n), link.si("lane", n + 10), link.si("lane", n + 20)).apply_async()
        for n in range(3)
    ]

    assert [result.get(timeout=60) for result in results] == [20, 21, 22]
    assert most_at_a_time(hall) == {"lane": 1}


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_lanes_on_every_pool(hall, pool):
    hall.work(pool=pool, concurrency=1 if pool == "solo" else 3)

    results = [hall.tasks.early.delay("lane", n) for n in range(8)]

    assert [result.get(timeout=60) for result in results] == list(range(8))
    assert begins(hall)["lane"] == list(range(8))
    assert most_at_a_time(hall) == {"lane": 1}
    eventually(lambda: not hall.left())


def test_a_child_that_is_killed_calls_the_next(hall):
    hall.work(pool="prefork", concurrency=2)
    hall.tasks.early.delay("lane", 0, 600)
    second = hall.tasks.early.delay("lane", 1)
    [begun] = eventually(lambda: [e for e in hall.events() if e["n"] == 0])

    os.kill(begun["pid"], signal.SIGKILL)

    assert second.get(timeout=30) == 1


ENDLESS_PRODUCER = """
import sys
from tests.workers.apps.lanes import early
for n in range(100_000):
    early.delay("lane", n)
    print(n, flush=True)
"""


def test_a_producer_that_is_killed_leaves_no_call_half_parked(hall):
    for _ in range(10 if FULL else 2):
        producer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS_PRODUCER],
            stdout=subprocess.PIPE,
            env={**os.environ, **hall.env, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
        )
        assert producer.stdout is not None
        for _ in range(random.Random(3).randint(20, 40)):
            said = int(producer.stdout.readline())
        producer.kill()
        with producer.stdout:
            said = max([said, *map(int, producer.stdout.read().split())])
        producer.wait()

        worker = hall.work()
        eventually(lambda last=said: _ended(hall, "lane") > last, timeout=60)
        eventually(lambda: not hall.left(), timeout=60)
        numbers = begins(hall)["lane"]
        assert numbers == list(range(len(numbers)))
        assert said + 1 <= len(numbers) <= said + 2  # the last call was parked, or it was not
        hall.kill(worker)
        hall.journal.write_text("")
