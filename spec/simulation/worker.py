"""A simulated worker: Celery's own strategy, requests and tracer, the library's own gate, renewer
and reaper; the event loop, the pool and the broker's consumer are the simulation's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.bootsteps import RUN
from celery.concurrency.base import apply_target
from celery.exceptions import TaskRevokedError
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer

from celery_unique.config.app_state import state_of
from celery_unique.worker.bootstrap import WorkerBootstrap

from .broker import Connection, received
from .environment import LATE, TASK, Current
from .scheduler import Event, Killed, Process

if TYPE_CHECKING:
    from .simulation import Simulation


@dataclass(slots=True)
class Entry:
    """Of the timer, as Celery's code looks at it."""

    time: float
    fun: Callable[..., object]
    args: tuple[Any, ...]

    @property
    def entry(self) -> Entry:
        return self


class Timer:
    def __init__(self) -> None:
        self.schedule = SimpleNamespace(queue=[])

    def call_at(self, eta: float, fun: Any, args: Any = (), **_: Any) -> Entry:
        """For an ETA, which Celery has converted to the real clock of this machine."""
        return self._add(args[0].eta.timestamp(), fun, args)

    def call_after(self, seconds: float, fun: Any, args: Any = (), **_: Any) -> Entry:
        return self._add(Current.scheduler.now + seconds, fun, args)

    def _add(self, moment: float, fun: Any, args: Any) -> Entry:
        entry = Entry(moment, fun, tuple(args))
        self.schedule.queue.append(entry)
        return entry

    def cancel(self, entry: Entry) -> None:
        if entry in self.schedule.queue:
            self.schedule.queue.remove(entry)

    def next_at(self) -> float:
        return min((entry.time for entry in self.schedule.queue), default=math.inf)

    def pop_due(self) -> Entry | None:
        due = [each for each in self.schedule.queue if each.time <= Current.scheduler.now]
        if not due:
            return None
        entry = min(due, key=lambda each: each.time)
        self.schedule.queue.remove(entry)
        return entry


class QoS:
    """The prefetch count: messages that wait for an ETA or at the gate are beside it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def increment_eventually(self) -> None:
        self.value += 1

    def decrement_eventually(self) -> None:
        self.value -= 1


class SimulatedConsumer(Consumer):
    """Celery's, without its connection and boot steps."""

    def __init__(self, worker: Worker) -> None:
        self.app = worker.process.app
        self.hostname = worker.name
        self.pid = worker.process.pid
        self.pool = worker.pool
        self.timer = worker.timer
        self.hub = worker
        self.qos = worker.qos
        self.controller = SimpleNamespace(
            state=worker_state,
            blueprint=SimpleNamespace(state=RUN),
            semaphore=None,
            app=self.app,
        )
        self.connection_errors = (OSError,)
        self.channel_errors = ()
        self.event_dispatcher = None
        self.disable_rate_limits = True
        self.task_buckets = {}
        self.on_task_request = worker.process_task
        self.on_task_message = set()
        self.restart_count = 0
        self._maximum_prefetch_restored = True
        self.task_consumer = SimpleNamespace(on_decode_error=None)
        self.strategies = {
            name: self.app.tasks[name].start_strategy(self.app, self) for name in (TASK, LATE)
        }
        self.on_message = self.create_task_handler()


class Pool:
    """Threads of the worker's process, or processes of their own; a job waits for a slot."""

    is_green = False
    flush = None

    def __init__(self, worker: Worker, slots: int, prefork: bool) -> None:
        self._worker = worker
        self._prefork = prefork
        self._jobs: deque[Callable[[], None]] = deque()
        self._free = [f"{worker.process.name}/{n}" for n in range(slots)]

    def apply_async(
        self,
        target: Any,
        args: Any = (),
        accept_callback: Any = None,
        callback: Any = None,
        error_callback: Any = None,
        correlation_id: str = "",
        **_: Any,
    ) -> Any:
        worker = self._worker

        def in_thread() -> None:
            slot = self._free.pop(0)

            def run() -> None:
                Current.simulation.in_pool(correlation_id, 1)
                try:
                    pid, dead = worker.process.pid, (Killed,)
                    apply_target(target, args, {}, callback, accept_callback, pid, propagate=dead)
                finally:
                    if not worker.process.is_dead:
                        Current.simulation.in_pool(correlation_id, -1)
                        self._release(slot)

            name = f"{worker.process.name} runs {correlation_id}"
            Current.scheduler.spawn(name, worker.process, run)

        def in_process() -> None:
            slot = self._free.pop(0)
            child = Current.simulation.new_process(slot)
            worker.children.append(child)
            ours = deepcopy(args)
            ended: list[bool] = []

            def run() -> None:
                Current.simulation.in_pool(correlation_id, 1)
                worker.soon(lambda: accept_callback(child.pid, Current.scheduler.now))
                Current.scheduler.point("accepted")
                returned = target(*ours)
                Current.scheduler.point("returned")
                ended.append(True)
                Current.simulation.in_pool(correlation_id, -1)
                worker.children.remove(child)
                worker.soon(lambda: callback(returned))
                worker.soon(lambda: self._release(slot))

            def lost() -> None:
                if worker.process.is_dead or ended:
                    return
                try:
                    raise WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)")
                except WorkerLostError:
                    einfo = ExceptionInfo()
                worker.children.remove(child)
                worker.soon(lambda: error_callback(einfo))
                worker.soon(lambda: self._release(slot))

            child.on_death = lost
            Current.scheduler.spawn(f"{slot} runs {correlation_id}", child, run)

        self._jobs.append(in_process if self._prefork else in_thread)
        self._start()
        return None

    def _start(self) -> None:
        while self._jobs and self._free:
            self._jobs.popleft()()

    def _release(self, slot: str) -> None:
        self._free.append(slot)
        self._start()


class Worker:
    """One life of a worker. It is its own hub: what Celery calls soon is run by the loop."""

    def __init__(self, simulation: Simulation, n: int, life: int) -> None:
        self.simulation = simulation
        self.name = f"w{n}"
        self.n, self.life = n, life
        self.process = simulation.new_process(f"worker {n}")
        self.process.on_death = self._died
        self.children: list[Process] = []
        self.broker = simulation.broker
        self._soon: deque[Callable[[], object]] = deque()
        self._wake = Event(lambda: Current.scheduler)
        self.timer = Timer()
        plan = simulation.plan
        self.qos = QoS(plan.prefetch)
        self.pool = Pool(self, plan.slots, plan.prefork)
        self.connection = Connection(self.broker)
        simulation.scheduler.spawn(f"worker {n} loop", self.process, self._loop)

    # -- as Celery's hub and controller -------------------------------------------------------

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._soon.append(lambda: callback(*args))
        self._wake.set()

    def soon(self, callback: Callable[[], object]) -> None:
        self.call_soon(callback)

    def process_task(self, request: Any) -> None:
        with suppress(TaskRevokedError):
            request.execute_using_pool(self.pool)

    def notify(self) -> None:
        self._wake.set()

    # -- the event loop -------------------------------------------------------------------------

    def _loop(self) -> None:
        simulation, scheduler = self.simulation, Current.scheduler
        app = self.process.app
        self.consumer = SimulatedConsumer(self)
        worker = SimpleNamespace(
            app=app, consumer=self.consumer, blueprint=self.consumer.controller.blueprint
        )
        self.bootstrap = WorkerBootstrap(state_of(app), worker)
        self.bootstrap._on_ready(self.consumer)
        while True:
            fault = scheduler.point("loop")
            if fault == "connection lost" or self.connection.is_lost:
                self._reconnect()
            self._wake.clear()
            if self._soon:
                self._soon.popleft()()
            elif (entry := self.timer.pop_due()) is not None:
                entry.fun(*entry.args)
            elif self.broker.waiting and self._may_take():
                n = simulation.choose_message(len(self.broker.waiting))
                message = self.broker.take(self.connection, n)
                simulation.note("received", task=message.task_id, worker=self.process.name)
                self.consumer.on_message(received(message, self.connection))
            else:
                until = self.timer.next_at() - scheduler.now
                self._wake.wait(None if math.isinf(until) else max(0.0, until))

    def _may_take(self) -> bool:
        held = [
            each
            for each in self.broker.unacknowledged.values()
            if each.connection is self.connection
        ]
        return len(held) < self.qos.value

    def _reconnect(self) -> None:
        self.simulation.note("connection lost", worker=self.process.name)
        self.broker.connection_lost(self.connection)
        self.connection = Connection(self.broker)
        self.consumer.on_close()
        self.consumer.restart_count += 1
        self.qos.value = self.simulation.plan.prefetch

    def revoked(self, task_id: str) -> None:
        """Celery's remote control, as the library wraps it."""
        worker_state.revoked.add(task_id)
        self.bootstrap._release_held({task_id})

    def _died(self) -> None:
        for child in list(self.children):  # the kernel kills them with it
            Current.scheduler.kill(child)
        self.broker.connection_lost(self.connection)
        self.simulation.worker_died(self)
