"""Calls at a high rate without faults, each of them accounted for.

Producers call two tasks with an empty body, in batches and one by one, as fast as the workers take
them. A producer notes what it was told of each call, and a body its start and its end: what was
lost or ran twice is counted from these notes alone. The leases are the default ones.

Run by `tests.chaos.soak`; its producers are ``python -m tests.chaos.rate``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

import celery_unique
from celery_unique.stores import open_store
from tests.chaos.journal import Event, Journal, read
from tests.chaos.stage import messages_in_redis
from tests.chaos.stores import OneServer, lock_servers
from tests.support import LocalProcess, RedisServer, Worker, eventually
from tests.support.worker import REPOSITORY, Pool

QUEUE = "rate"
BATCH = 50
#: Few enough that most calls find their key held, and that producers and workers meet at it.
KEYS_PER_TASK = 150
#: How many messages may wait before the producers do.
BACKLOG = 1000
WORKERS: dict[str, tuple[Pool, int]] = {"w1": ("prefork", 2), "w2": ("threads", 4)}
PRODUCERS = 2
#: From the last line of a body to the lock given back, on a busy machine.
FINISH_S = 0.75


# -- the app ------------------------------------------------------------------------------


def make_app(settings: dict[str, Any]) -> Celery:
    journal = Journal(settings["journal"], settings["role"])
    app = Celery("rate", broker=settings["broker"], set_as_current=False)
    app.conf.update(
        unique_store_url=settings["store"],
        unique_store_timeout=5,
        task_default_queue=QUEUE,
        task_ignore_result=True,
        worker_prefetch_multiplier=16,
        worker_hijack_root_logger=True,
        broker_connection_retry_on_startup=True,
    )
    celery_unique.install(app)
    for logger in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(logger).setLevel(logging.WARNING)  # two lines for each task

    def body(task: Any, number: int) -> None:
        began = time.monotonic()
        key = f"{task.name}({number})"
        journal.note("ran", t=began, id=task.request.id, key=key, until=time.monotonic())

    for name, late in (("early", False), ("late", True)):
        app.task(bind=True, name=name, unique=True, acks_late=late)(body)
    return app


SETTINGS: dict[str, Any] = json.loads(os.environ.get("RATE", "{}"))
if SETTINGS:
    app = make_app(SETTINGS)


# -- a producer -----------------------------------------------------------------------------


def produce() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    dice = random.Random(SETTINGS["seed"])
    journal = Journal(SETTINGS["journal"], SETTINGS["role"])
    pause = Path(SETTINGS["journal"]) / "pause"
    tasks = [app.tasks["early"], app.tasks["late"]]
    while not ended.is_set():
        if pause.exists():
            time.sleep(0.05)
            continue
        began = time.monotonic()
        calls = [(dice.choice(tasks), dice.randrange(SETTINGS["keys"])) for _ in range(BATCH)]
        if dice.random() < 0.1:
            results = [task.delay(number) for task, number in calls]
        else:
            results = celery_unique.apply_many(task.s(number) for task, number in calls)
        told = [[f"{task.name}({number})"] for task, number in calls]
        for each, result in zip(told, results, strict=True):
            each += [result.id, result.outcome]
        journal.note("batch", t=began, calls=told)


# -- a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """What became of the calls of a run."""

    calls: int
    runs: int
    lost: int  # accepted, and never run; or told of a task that had ended
    duplicated: int  # run twice, or beside another task of its key
    left: int  # messages and locks that remained
    seconds: float

    @property
    def passed(self) -> bool:
        return not (self.lost or self.duplicated or self.left)


def run(broker: str, store: str, seed: int, seconds: float, directory: Path) -> Account:
    began = time.monotonic()
    with ExitStack() as opened:
        servers = lock_servers(store)
        opened.enter_context(servers.opened)
        servers.prepare()
        if broker == "one redis":
            assert isinstance(servers, OneServer)
            assert isinstance(servers.server, RedisServer)
            queues, address = servers.server, servers.url
        else:
            queues = opened.enter_context(RedisServer())
            address = queues.url
        settings = {
            "journal": str(directory),
            "broker": address,
            "store": servers.url,
            "keys": KEYS_PER_TASK,
        }
        workers = []
        for name, (pool, concurrency) in WORKERS.items():
            worker = Worker(
                "tests.chaos.rate",
                log_path=directory / f"{name}.log",
                pool=pool,
                concurrency=concurrency,
                queues=[QUEUE],
                log_level="INFO",
                name=name,
                env={"RATE": json.dumps({**settings, "role": name})},
            )
            worker.launch()
            opened.callback(worker.kill)
            opened.callback(worker.stop, timeout=60)
            workers.append(worker)
        with _producing(settings, seed, directory):
            for worker in workers:
                worker.wait_for_log(r" ready\.", 60)
            eventually(lambda: _called(directory), timeout=60, message="no producer calls")
            _hold_back(queues, directory, time.monotonic() + seconds)
        eventually(lambda: messages_in_redis(queues, 0, QUEUE) == 0, timeout=120, interval=0.2)
        left = _left(servers.url)
    return account(read(directory), left, time.monotonic() - began)


@contextmanager
def _producing(settings: dict[str, Any], seed: int, directory: Path) -> Iterator[None]:
    producers = []
    for number in range(PRODUCERS):
        mine = {**settings, "role": f"p{number}", "seed": seed * 1000 + number}
        producer = LocalProcess(
            [sys.executable, "-m", "tests.chaos.rate"],
            log_path=directory / f"p{number}.log",
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RATE": json.dumps(mine)},
        )
        producer.start()
        producers.append(producer)
    try:
        yield
        for producer in producers:
            # One that raised has ended by itself: without faults there is no reason to.
            if not producer.is_running():
                raise producer.failure("a producer ended in a run without faults")
            producer.stop(timeout=60)
    finally:
        for producer in producers:
            producer.kill()


def _called(directory: Path) -> bool:
    return any(path.stat().st_size for path in directory.glob("p*.jsonl"))


def _hold_back(queues: RedisServer, directory: Path, until: float) -> None:
    """Let the producers wait while too many messages do."""
    pause = directory / "pause"
    while time.monotonic() < until:
        if messages_in_redis(queues, 0, QUEUE) > BACKLOG:
            pause.touch()
        else:
            pause.unlink(missing_ok=True)
        time.sleep(0.05)


def _left(url: str) -> int:
    """How many locks are there although all messages were handled."""
    store = open_store(url, timeout_s=5)

    def locks() -> int:
        return sum(len(record.tasks) for _, record in store.walk())

    try:
        eventually(lambda: not locks(), timeout=10, interval=0.5)
    except AssertionError:
        return locks()
    finally:
        store.close()
    return 0


def account(events: Iterable[Event], left: int = 0, seconds: float = 0.0) -> Account:
    """Count, from what producers and bodies have noted."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    keys: dict[str, list[tuple[float, float]]] = defaultdict(list)
    batches = []
    for event in events:
        if event["what"] == "ran":
            runs[event["id"]].append((event["t"], event["until"]))
            keys[event["key"]].append((event["t"], event["until"]))
        elif event["what"] == "batch":
            batches.append(event)
    calls = lost = 0
    for batch in batches:
        for _key, task_id, outcome in batch["calls"]:
            calls += 1
            ends = [end for _, end in runs.get(task_id, ())]
            was_over = outcome != "created" and ends and max(ends) < batch["t"] - FINISH_S
            lost += not ends or bool(was_over)
    return Account(
        calls=calls,
        runs=sum(map(len, runs.values())),
        lost=lost,
        duplicated=sum(len(each) - 1 for each in runs.values()) + sum(map(_beside, keys.values())),
        left=left,
        seconds=seconds,
    )


def _beside(runs: list[tuple[float, float]]) -> int:
    """How many of the runs began while another one went on."""
    count, latest = 0, float("-inf")
    for start, end in sorted(runs):
        count += start < latest
        latest = max(latest, end)
    return count


if __name__ == "__main__":
    produce()
