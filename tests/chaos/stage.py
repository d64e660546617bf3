"""Everything a chaos run needs: servers, proxies, workers and producers, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import amqp

from celery_unique.stores import open_store
from tests.chaos.journal import Journal, read
from tests.chaos.stores import OneServer, lock_servers
from tests.support import (
    LocalProcess,
    ProcessFailed,
    RabbitMQServer,
    RedisServer,
    TcpProxy,
    Worker,
    eventually,
)
from tests.support.worker import REPOSITORY, Pool

QUEUE = "chaos"
#: A pause of the machine that long is written down as a fault: nobody renews during it.
STALL_S = 0.75
#: For the bodies that run to end; the longest take twice a run lease. A process of a prefork pool
#: whose last result was not read waits half a minute for that.
SHUTDOWN_S = 45.0


@dataclass(frozen=True)
class Plan:
    """What is started, and how short its leases are."""

    broker: str  # redis, rabbitmq, or one redis: a server for the messages and the locks
    seed: int
    store: str = "redis"  # redis, valkey, sentinel, cluster, postgresql or mariadb
    clock: bool = False  # the server of the locks has one that can be set, if it can have one
    disk: bool = False  # and a disk that can be filled
    run_lease: float = 3.0
    queue_lease: float = 20.0
    grace: float = 5.0
    visibility: float = 4.0
    keys: int = 3
    calls_per_s: float = 25.0
    long_bodies: float = 0.04  # the share that outlives its lease
    producers: int = 3
    broken: str = ""
    tasks: tuple[str, ...] = ()  # the only ones that are called; empty: all
    #: The tree of another release: every other process that is started is one of it.
    previous: str = ""

    @property
    def longest_lease(self) -> float:
        """With the longest countdown of a call, and of a retry, in front."""
        return max(self.queue_lease, self.grace) + 1.0


WORKERS: dict[str, tuple[Pool, int]] = {
    "w1": ("prefork", 2),
    "w2": ("prefork", 2),
    "w3": ("threads", 3),
}


class Stage:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.journal = Journal(directory, "runner")
        self.store = lock_servers(plan.store, clock=plan.clock, disk=plan.disk)
        self.backend = RedisServer()
        self.rabbitmq = RabbitMQServer() if plan.broker == "rabbitmq" else None
        self.workers: dict[str, Worker] = {}
        self.producers: dict[str, LocalProcess] = {}
        #: (who, "store", "broker" or "both") -> what stands between them.
        self.proxies: dict[tuple[str, str], TcpProxy] = {}
        self._producers_started = 0
        self._workers_started = 0
        self._open = contextlib.ExitStack()
        self._watch_ended = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def _start(self) -> None:
        servers = [self.store.opened, self.backend, *([self.rabbitmq] if self.rabbitmq else [])]
        for server in servers:
            self._open.enter_context(server)
        self.store.prepare()
        for who in (*WORKERS, "producers"):
            ports = {"store": self.store.port, "broker": self._broker_port}
            if self._has_one_server:  # at one address, so that lock and message can be one act
                ports = {"both": self.store.port}
            for link, port in ports.items():
                if port is not None:
                    self.proxies[who, link] = self._open.enter_context(TcpProxy(port))
        self._open.callback(self._kill_all)
        self.journal.note(
            "settings",
            **asdict(self.plan),
            longest_lease=self.plan.longest_lease,
            clock_offset=time.time() - time.monotonic(),
        )
        for name in WORKERS:
            self.start_worker(name)
        for worker in self.workers.values():
            worker.wait_for_log(r" ready\.", 60)
        for _ in range(self.plan.producers):
            self.start_producer()
        # An episode that ends before the first call would show nothing.
        eventually(self._all_call, timeout=60, interval=0.1, message="a producer makes no call")
        threading.Thread(target=self._watch_machine, daemon=True).start()
        self._open.callback(self._watch_ended.set)

    def _all_call(self) -> bool:
        callers = {event["pid"] for event in read(self.directory) if event["what"] == "call"}
        return len(callers) >= self.plan.producers

    def _kill_all(self) -> None:
        for process in (*self.workers.values(), *self.producers.values()):
            process.kill()

    def _watch_machine(self) -> None:
        before = time.monotonic()
        while not self._watch_ended.wait(0.05):
            now = time.monotonic()
            if now - before > STALL_S:
                self.journal.note("fault", t=before, until=now, fault="machine stalled")
            before = now

    # -- addresses -------------------------------------------------------------

    @property
    def _has_one_server(self) -> bool:
        return self.plan.broker == "one redis"

    def _through(self, who: str, link: str, url: str) -> str:
        """The URL through the proxy that stands there, if there is one."""
        proxy = self.proxies.get((who, "both" if self._has_one_server else link))
        return proxy.url_of(url) if proxy else url

    @property
    def _broker_port(self) -> int:
        return self.rabbitmq.port if self.rabbitmq else self.backend.port

    @property
    def _broker_url(self) -> str:
        if self._has_one_server:
            return self.store.url
        return self.rabbitmq.url if self.rabbitmq else self.backend.url_of(1)

    def _environment(self, role: str, who: str, **more: Any) -> dict[str, str]:
        chaos = {
            **asdict(self.plan),
            "role": role,
            "runner": os.getpid(),
            "one_server": self._has_one_server,
            "journal": str(self.directory),
            "broker": self._through(who, "broker", self._broker_url),
            "store": self._through(who, "store", self.store.url),
            "backend": self.backend.url_of(2),
            **more,
        }
        return {"CHAOS": json.dumps(chaos)}

    # -- processes -------------------------------------------------------------

    def _tree(self, role: str, number: int) -> Path:
        """Where the code of the process with this number is."""
        is_previous = bool(self.plan.previous) and number % 2 == 1
        self.journal.note("started", role=role, previous=is_previous)
        return Path(self.plan.previous) if is_previous else REPOSITORY

    def start_worker(self, name: str) -> Worker:
        """Without waiting: it takes seconds, in which the others go on."""
        pool, concurrency = WORKERS[name]
        self._workers_started += 1
        tree = self._tree("worker", self._workers_started)
        worker = Worker(
            "tests.chaos.app",
            log_path=self.directory / f"{name}-{self._workers_started}.log",
            pool=pool,
            concurrency=concurrency,
            queues=[QUEUE],
            env=self._environment(name, name),
            name=name,
            cwd=tree,
            python_path=[tree],
        )
        worker.launch()
        self.workers[name] = worker
        return worker

    def start_producer(self) -> None:
        self._producers_started += 1
        name = f"p{self._producers_started}"
        tree = self._tree("producer", self._producers_started)
        seed = self.plan.seed * 1000 + self._producers_started
        producer = LocalProcess(
            [sys.executable, "-m", "tests.chaos.producers"],
            log_path=self.directory / f"{name}.log",
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}",
                **self._environment(name, "producers", seed=seed),
            },
        )
        producer.start()
        self.producers[name] = producer

    def stop_producers(self) -> None:
        for producer in self.producers.values():
            producer.stop(timeout=20)

    def stop_workers(self) -> None:
        for name in self.workers:
            self.stop_worker(name)

    def stop_worker(self, name: str) -> None:
        """Warm shutdown. One that does not end is killed; the journal has where it waited."""
        worker = self.workers[name]
        pids = [worker.pid, *worker.children()]
        began = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        try:
            eventually(lambda: not worker.is_running(), timeout=SHUTDOWN_S)
        except AssertionError:
            waits_in = _where_it_waits(worker)
            worker.kill()
            until = time.monotonic()
            self.journal.note("stuck", worker=name, waits_in=waits_in)
            self.journal.note(
                "fault", t=began, until=until, fault="worker killed", target=name, pids=pids
            )
        worker.kill()  # what it may have left behind

    # -- the end of a run --------------------------------------------------------

    def messages_waiting(self) -> int:
        """How many messages the broker has, delivered and unacknowledged ones included."""
        if self.rabbitmq is not None:
            return self._rabbitmq_messages(self.rabbitmq)
        server, database = (self.backend, 1)
        if self._has_one_server:
            assert isinstance(self.store, OneServer)
            assert isinstance(self.store.server, RedisServer)
            server, database = self.store.server, 0
        return messages_in_redis(server, database, QUEUE)

    def _rabbitmq_messages(self, server: RabbitMQServer) -> int:
        connection = amqp.Connection(host=f"127.0.0.1:{server.port}", connect_timeout=5)
        connection.connect()
        try:
            ready = connection.channel().queue_declare(QUEUE, passive=True).message_count
        finally:
            connection.close()
        if ready:
            return int(ready)
        # Asked last, since it takes a second.
        listed = server.control("--quiet", "list_queues", "--no-table-headers", "name", "messages")
        found = [line.split() for line in listed.splitlines()]
        return sum(int(count) for name, count in found if name == QUEUE)

    def drain(self, within_s: float) -> bool:
        """Wait until every message was handled and no body runs: whether that came to pass within
        this time after the last body that began. (A lane may have hundreds of calls to run.)"""
        begun, ends = -1, 0.0
        while not self._is_quiet():
            before, begun = begun, self.bodies_begun()
            if begun > before:
                ends = time.monotonic() + within_s
            elif time.monotonic() > ends:
                return False
            time.sleep(0.3)
        return True

    def _is_quiet(self) -> bool:
        return not self._bodies_running() and self.messages_waiting() == 0

    def bodies_begun(self) -> int:
        return sum(event["what"] == "start" for event in read(self.directory))

    def _bodies_running(self) -> int:
        running: set[tuple[str, str]] = set()
        dead: set[int] = set()
        for event in read(self.directory):
            if event["what"] == "start":
                running.add((event["delivery"], event["pid"]))
            elif event["what"] == "end":
                running.discard((event["delivery"], event["pid"]))
            elif event["what"] == "fault" and "killed" in event["fault"]:
                dead |= set(event["pids"])
        return sum(pid not in dead for _, pid in running)

    def locks(self) -> tuple[list[dict[str, Any]], int]:
        """What the store still holds: its locks, and the number of marks."""
        store = open_store(self.store.url, timeout_s=5)
        locks, marks = [], 0
        try:
            for key, record in store.walk():
                marks += len(record.marks)
                locks += [
                    {"key": key, "id": task_id, "state": task.state, "task": task.task_name}
                    | {"created": task.created_at, "lease": task.lease, "flags": task.flags}
                    | {"delivery": task.delivery}
                    for task_id, task in record.tasks.items()
                ]
        finally:
            store.close()
        return locks, marks


def _where_it_waits(worker: Worker) -> list[str]:
    """The functions in which the main thread is, outermost first: Celery logs them at SIGUSR1. Then
    the processes of its pool that wait for anything but their next task."""
    children = worker.children()
    worker.send_signal(signal.SIGUSR1)
    try:
        log = worker.wait_for_log(r"(?s)\nMainThread\n=+\n(.*?)\n=+\nLOCAL VARIABLES", 10)
    except ProcessFailed:
        return []
    calls = re.findall(r'File "(?:.*/)?([^"/]+/[^"/]+\.py)", line \d+, in (\w+)', log[1])
    busy = [f"process {pid}" for pid in children if not _reads_a_pipe(pid)]
    return [*(f"{file} {function}" for file, function in calls), *busy]


def _reads_a_pipe(pid: int) -> bool:
    """As the processes of a prefork pool do that wait for a task."""
    try:
        number, fd, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
        return number == "0" and str(Path(f"/proc/{pid}/fd/{int(fd, 16)}").readlink()).startswith(
            "pipe:"
        )
    except (OSError, ValueError):
        return False


def messages_in_redis(server: RedisServer, database: int, queue: str) -> int:
    """How many messages kombu has there, delivered and unacknowledged ones included."""
    with server.client(database) as client:
        # Each priority has a list of its own, named after the queue.
        names = client.keys(f"{queue}*")
        queued = sum(client.llen(name) for name in names if client.type(name) == b"list")
        return int(queued + client.hlen("unacked"))
