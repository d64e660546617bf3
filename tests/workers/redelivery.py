"""Many late acknowledged tasks on a broker that delivers their messages again while they run."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from tests.support import Worker
from tests.support.redis_journal import MessageLife, RedisJournal
from tests.workers.apps.redelivered import TASK, VARIABLE, make_app

#: Run and worker of a body, with its time of begin and end: None if it was killed.
Run = tuple[str, str, float, float | None]


@dataclass
class Figures:
    """What became of the calls."""

    calls: int
    runs: int = 0
    overlaps: int = 0
    lost: int = 0
    #: Lost with a process that had popped the message, and not recorded it: see `RedisJournal`.
    swallowed: int = 0
    #: What the journal of the broker has about lost messages that it does not explain.
    unexplained: list[str] = field(default_factory=list)
    more_than_once: int = 0
    kills: int = 0
    #: Workers that have ended by themselves, and were started again.
    ends: int = 0
    #: Deliveries that a guard has dropped: the broker did deliver messages twice.
    dropped: int = 0
    seconds: float = 0.0

    def row(self, *names: str) -> str:
        cells = [
            *names,
            f"{self.calls:,}",
            f"{self.runs:,}",
            f"{self.more_than_once:,}",
            f"{self.overlaps:,}",
            f"{self.lost:,}",
            f"{self.seconds:.0f} s",
        ]
        return "| " + " | ".join(cells) + " |"


#: Many times what a redelivery takes.
GIVE_UP_S = 30.0

HEAD = (
    "| broker | faults | tasks | calls | runs | ran more than once | overlaps | lost | took |\n"
    "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


@dataclass
class Redelivery:
    """One app, its workers, and the diary of its bodies."""

    directory: Path
    settings: dict[str, Any]
    workers: int
    concurrency: int
    running: dict[str, Worker] = field(default_factory=dict)
    #: Before and after each kill.
    killed: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    #: Where the broker and the diary are one Redis that has one.
    journal: RedisJournal | None = None
    called: int = 0
    #: The last lines of workers that have ended by themselves.
    last_words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.redis = redis.Redis.from_url(self.settings["redis_url"], decode_responses=True)
        # As any producer: the library is the worker's business.
        self.caller: Celery = make_app(**{**self.settings, "mode": "plain"})

    @contextmanager
    def working(self) -> Iterator[None]:
        names = [f"redelivered{n}" for n in range(self.workers)]
        try:
            for name in names:
                self.start(name, wait=False)
            for worker in self.running.values():
                worker.wait_for_log(r"ready\.", 60)
            yield
        finally:
            for worker in self.running.values():
                worker.kill()
            self.caller.close()

    def start(self, name: str, *, wait: bool = True) -> Worker:
        number = len(list(self.directory.glob("*.log")))
        worker = Worker(
            "tests.workers.apps.redelivered",
            name=name,
            pool="threads",
            concurrency=self.concurrency,
            queues=["work"],
            env={VARIABLE: json.dumps(self.settings)},
            log_path=self.directory / f"{name}-{number}.log",
        )
        self.running[name] = worker
        if wait:
            worker.start()
        else:
            worker.launch()
        return worker

    def call(self, numbers: Iterable[int]) -> None:
        for n in numbers:
            self.called += 1
            self.caller.send_task(TASK, (n,), task_id=str(n), ignore_result=False)

    def kill_one(self) -> bool:
        """SIGKILL a worker that is ready, at any moment, and start it again under its name.
        Returns whether one was ready."""
        ready = [name for name, each in self.running.items() if "ready." in each.log()]
        if not ready:
            return False
        name = random.choice(ready)
        worker = self.running[name]
        before = time.time()
        worker.kill()
        self.killed.setdefault(worker.hostname, []).append((before, time.time()))
        self.start(name, wait=False)
        return True

    def revive(self) -> None:
        """Start the workers again that have ended by themselves."""
        for name, worker in list(self.running.items()):
            if not worker.is_running():
                now = time.time()
                self.killed.setdefault(worker.hostname, []).append((now, now))
                self.last_words.append(worker.log()[-1500:])
                self.start(name, wait=False)

    def ended(self, number: int) -> int:
        with self.redis.pipeline(transaction=False) as pipe:
            for n in range(number):
                pipe.exists(f"ends:{n}")
            return sum(pipe.execute())

    def await_ends(self, number: int, timeout: float, meanwhile: Callable[[], None]) -> None:
        """Until every task has ended once, or none has for a long time: the others are lost."""
        until, seen, since = time.monotonic() + timeout, 0, time.monotonic()
        while (ended := self.ended(number)) < number and time.monotonic() < until:
            if ended != seen or self.called < number:
                seen, since = ended, time.monotonic()
            elif time.monotonic() - since > GIVE_UP_S:
                break
            meanwhile()
            time.sleep(0.2)

    def await_silence(self, number: int, quiet_s: float, timeout: float) -> None:
        """No task has begun for a while: no copy is left to run."""

        def begun() -> int:
            with self.redis.pipeline(transaction=False) as pipe:
                for n in range(number):
                    pipe.llen(f"begins:{n}")
                return sum(pipe.execute())

        until, seen, since = time.monotonic() + timeout, begun(), time.monotonic()
        while time.monotonic() - since < quiet_s and time.monotonic() < until:
            self.revive()
            time.sleep(0.3)
            if (now := begun()) != seen:
                seen, since = now, time.monotonic()

    def figures(self, number: int) -> Figures:
        ends = len(self.last_words)
        figures = Figures(number, kills=sum(map(len, self.killed.values())) - ends, ends=ends)
        lost: list[str] = []
        for n in range(number):
            runs = self.runs(n)
            figures.runs += len(runs)
            figures.more_than_once += len(runs) > 1
            if not any(run[3] for run in runs):
                figures.lost += 1
                lost.append(str(n))
            figures.overlaps += self._overlaps(runs)
        logs = (path.read_text(errors="replace") for path in self.directory.glob("*.log"))
        figures.dropped = sum(log.count("it has already finished") for log in logs)
        if self.journal is not None:
            self._explain(figures, lost, self.journal.messages())
        return figures

    def _explain(self, figures: Figures, lost: list[str], lives: dict[str, MessageLife]) -> None:
        swallowed = [task_id for task_id in lost if lives[task_id].is_swallowed]
        figures.swallowed = len(swallowed)
        early = [task_id for task_id, life in lives.items() if life.acknowledged_early]
        for task_id in sorted({*lost} - {*swallowed} | {*early}):
            life = lives[task_id]
            figures.unexplained.append(f"task {task_id}: {' '.join(life.events)}")

    def runs(self, n: int) -> list[Run]:
        ends = self.redis.hgetall(f"ends:{n}")
        begins = [json.loads(line) for line in self.redis.lrange(f"begins:{n}", 0, -1)]
        return [
            (run, worker, at, float(ends[run]) if run in ends else None)
            for run, worker, at in begins
        ]

    def _overlaps(self, runs: Sequence[Run]) -> int:
        """How many runs began while another one of the same task lasted."""
        spans = sorted((at, self._end(run)) for run in runs for at in [run[2]])
        overlaps, latest = 0, 0.0
        for begin, end in spans:
            overlaps += begin < latest
            latest = max(latest, end)
        return overlaps

    def _end(self, run: Run) -> float:
        _, worker, began, ended = run
        if ended is not None:
            return ended
        ends = [max(before, began) for before, at in self.killed.get(worker, ()) if at >= began]
        return min(ends, default=time.time())


def play(
    stage: Redelivery,
    number: int,
    *,
    timeout: float,
    quiet_s: float,
    meanwhile: Callable[[], None] = lambda: None,
    first: int | None = None,
) -> Figures:
    """Call, wait for the ends and for what may still come, and count. After the ``first`` calls
    the others are made by ``meanwhile``."""
    with stage.working():
        began = time.monotonic()
        stage.call(range(number if first is None else first))
        stage.await_ends(number, timeout, meanwhile)
        took = time.monotonic() - began
        stage.await_silence(number, quiet_s, 60)  # without a guard it may go on for ever
        figures = stage.figures(number)
    figures.seconds = took
    return figures


def every(seconds: float, act: Callable[[], bool | None], times: int) -> Callable[[], None]:
    """``act``, that often at most, with a pause between. It does not count if it is False."""
    last, done = [time.monotonic()], [0]

    def maybe() -> None:
        if done[0] < times and time.monotonic() - last[0] >= seconds:
            done[0] += act() is not False
            last[0] = time.monotonic()

    return maybe


@contextmanager
def looking_for_lost_messages(app: Celery) -> Iterator[None]:
    """As any worker with an event loop does beside others. Greenlets have none: kombu then
    looks when nothing at all has come for two seconds, and Redis says every second that
    nothing has."""
    stop = threading.Event()

    def look() -> None:
        with app.connection_for_read() as connection:
            qos = connection.default_channel.qos
            while not stop.wait(0.5):
                qos.restore_visible(interval=1)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(10)
