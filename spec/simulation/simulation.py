"""One run: a plan, and the decisions of its scheduler; what happened is its trace."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from celery import states
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from celery_unique import header
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import DuplicateTask, StoreUnavailable
from celery_unique.publish.revoke import free_keys
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Record

from .broker import ACTS, Broker, SimulatedClock, StoreClient
from .environment import LATE, TASK, Current, WorkerState, app_of, enter
from .plan import FAULTS, LONG_PAUSES_S, SHORT_PAUSES_S, Call, Plan
from .scheduler import EPOCH_S, Actor, Decisions, Key, NeverEnds, Process, Scheduler
from .scheduler import Event as Wake
from .worker import Worker

EPOCH_US = round(EPOCH_S * 1_000_000)
#: A run in which something is left after this time, of which faults take some minutes at most.
LONGEST_S = 2500.0
#: How long a worker that died takes to be started again.
RESTART_S = 1.0
#: How many seconds late a request arrives.
LATE_S = (0.0, 0.4, 2.0, 7.0)


@dataclass(slots=True)
class Event:
    """Something that happened: the checker knows nothing else."""

    at_s: float
    actor: str
    kind: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.at_s:9.4f} {self.actor}: {self.kind} {shown}".rstrip()


@dataclass(slots=True)
class Trace:
    plan: Plan
    events: list[Event] = field(default_factory=list)
    decisions: dict[Key, Any] = field(default_factory=dict)
    points: int = 0
    ended: bool = True
    left: str = ""
    acts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        return "\n".join(map(str, self.events))


class Simulation:
    def __init__(
        self, plan: Plan, decisions: Decisions, store_class: type[MemoryStore] = MemoryStore
    ) -> None:
        self.plan = plan
        self.trace = Trace(plan)
        self.decisions = decisions
        self.scheduler = Scheduler(decisions, plan.switchiness)
        self.scheduler.enter = enter
        self.scheduler.fault_at = self._fault_at
        self.broker = Broker(plan.by_time)
        self.broker.on_message = self._message_arrived
        self.results: dict[str, Any] = {}
        self.store: Any = type("Store", (SimulatedClock, store_class), {})()
        self.workers: dict[int, Worker] = {}
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._pids = itertools.count(1000)
        self._processes: list[Process] = []
        self._budget = plan.budget
        self._calls_left = len(plan.calls)
        self._running: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()
        #: Ids that are returned to callers, by the number of the call.
        self._returned: dict[int, str] = {}
        self._lives: Counter[int] = Counter()

    # -- for the environment -------------------------------------------------------------------

    def next_id(self) -> str:
        return f"t{next(self._ids)}"

    def next_number(self) -> int:
        return next(self._numbers)

    def has_died(self, pid: int) -> bool:
        """As the library sees it: processes of this machine."""
        return self.plan.same_machine and any(p.pid == pid and p.is_dead for p in self._processes)

    def note(self, kind: str, **facts: Any) -> None:
        actor = self.scheduler.current
        name = actor.name if actor is not None else ""
        self.trace.events.append(Event(self.scheduler.now - EPOCH_S, name, kind, facts))

    def note_act(self, name: str, arguments: tuple[Any, ...], reply: Any, *, late: bool) -> None:
        shown = kind_of(reply)
        self.trace.acts[f"{name}: {shown}"] += 1
        if name not in ACTS:
            return
        task = task_of(name, arguments)
        facts: dict[str, Any] = {"task": task, "reply": shown}
        if name == "acquire":
            facts["replaced"] = tuple(reply.replaced)
            facts["holder"] = reply.holder.task_id if reply.holder is not None else ""
        if name == "start" and reply.verdict == "run":
            facts["token"], facts["key"] = reply.token - EPOCH_US, arguments[0][2:8]
            facts["delivery"] = arguments[1].delivery.rpartition("/")[2]
        if late:
            facts["late"] = True
        self.note(name, **facts)

    def note_removal(self, store: MemoryStore, key: str, task_id: str) -> None:
        """A call that may follow another is about to leave the store."""
        if task_id in dict(store.followers(key)) and not self._has_result(task_id):
            self.note("removed without a result", task=task_id)

    # -- processes -----------------------------------------------------------------------------

    def new_process(self, name: str) -> Process:
        """With an app of its own, which earlier runs have used."""
        app = app_of(name)
        process = Process(name, pid=next(self._pids), app=app)
        process.worker_state = WorkerState()
        process.random = Random(f"{self.plan.seed} {process.pid}")
        app_state = state_of(app)
        app.conf.unique_on_store_error = self.plan.on_store_error
        app_state.use_store(StoreClient(self.store, process))
        self._processes.append(process)
        return process

    def _start_worker(self, n: int) -> None:
        self._lives[n] += 1
        self.workers[n] = Worker(self, n, self._lives[n])

    def worker_died(self, worker: Worker) -> None:
        self.workers.pop(worker.n, None)

        def restart() -> None:
            self.scheduler.sleep(RESTART_S)
            self._start_worker(worker.n)

        self.scheduler.spawn(f"supervisor {worker.n}", self._outside, restart)

    def _message_arrived(self) -> None:
        for worker in self.workers.values():
            worker.notify()

    def choose_message(self, waiting: int) -> int:
        """Which message a worker gets: mostly the first."""
        actor = self.scheduler.current
        assert actor is not None

        def draw(random: Random) -> int | None:
            chosen = random.randrange(waiting) if random.random() < 0.2 else 0
            return chosen or None

        chosen = self.decisions.choose((actor.name, actor.points, "message"), draw)
        return min(chosen or 0, waiting - 1)

    # -- faults --------------------------------------------------------------------------------

    def _fault_at(self, actor: Actor, where: str) -> Any:
        kinds = [kind for kind in self.plan.faults if self._applies(kind, actor, where)]
        if not kinds and self.decisions.is_random:
            return None

        # A call has few points, and most of a worker's are those of a loop that waits.
        rare = "caller" in actor.process.name or where in ("publish", "reply of the broker")
        weight = 5.0 if rare else 1.0

        def draw(random: Random) -> Any:
            if self._budget <= 0 or random.random() >= self.plan.fault_rate * weight:
                return None
            kind = random.choice(kinds)
            if kind == "short pause":
                return kind, random.choice(SHORT_PAUSES_S)
            if kind == "long pause":
                return kind, random.choice(LONG_PAUSES_S)
            if kind == "request late":
                return kind, random.choice(LATE_S)
            return kind

        fault = self.decisions.choose((actor.name, actor.points, "fault"), draw)
        if fault is None:
            return None
        kind, amount = fault if isinstance(fault, tuple) else (fault, 0.0)
        if not self._applies(kind, actor, where):  # a decision of another run, which fits no more
            self.decisions.made.pop((actor.name, actor.points, "fault"))
            return None
        self._budget -= 1
        self.trace.faults[kind] += 1
        process = actor.process
        facts: dict[str, Any] = {"process": process.name, "at": where}
        if amount:
            facts["seconds"] = amount
        if kind in ("caller dies", "worker dies", "pool process dies"):
            self._note_death(kind, process, facts)
            self.scheduler.kill(process)
        elif kind in ("short pause", "long pause"):
            self.note(kind, **facts)
            self._pause(process, amount)
        else:
            self.note(kind, **facts)
            return fault
        return None

    def _applies(self, kind: str, actor: Actor, where: str) -> bool:
        name = actor.process.name
        if kind == "caller dies" and not name.startswith("caller"):
            return False
        if kind == "worker dies" and not (name.startswith("worker") and "/" not in name):
            return False
        if kind == "pool process dies" and "/" not in name:
            return False
        if not name.startswith(("caller", "worker")):
            return False
        return where.startswith(FAULTS[kind])

    def _note_death(self, kind: str, process: Process, facts: dict[str, Any]) -> None:
        """With the tasks that it takes with it, and those whose message is gone for good."""
        taken = []
        for task, name in list(self._in_pool):
            its = name == process.name or name.startswith(f"{process.name}/")
            if its and self._in_pool.pop((task, name)) > 0:
                taken.append(task)
        gone = [task for task in taken if not self.broker.has(task)]
        self.note(kind, **facts, took=tuple(taken), gone=tuple(gone))

    def in_pool(self, task_id: str, number: int) -> None:
        """A process or thread of a pool has begun with a task, or has done with it."""
        actor = self.scheduler.current
        assert actor is not None
        self._in_pool[task_id, actor.process.name] += number

    def _pause(self, process: Process, seconds: float) -> None:
        ends_at = self.scheduler.now + seconds
        paused = [process]
        for worker in list(self.workers.values()):
            if worker.process is process:
                paused += worker.children
                if seconds > 10 and not self.plan.by_time:  # its heartbeat is missed
                    self.broker.connection_lost(worker.connection)
        for each in paused:
            each.paused_until = max(each.paused_until, ends_at)

    # -- bodies --------------------------------------------------------------------------------

    def run_body(self, task: Any, *args: Any, **kwargs: Any) -> str:
        request = task.request
        task_id = str(request.id)
        self._starts[task_id] += 1
        number = self._starts[task_id]
        lock = request.unique
        blind = lock is None or not lock.token
        self.note(
            "body begins",
            task=task_id,
            number=number,
            key=args[0] if args else kwargs.get("shop"),
            token=0 if blind else lock.token - EPOCH_US,
            retries=request.retries,
            values=tuple(kwargs.get("values") or ()),
        )

        def draw(random: Random) -> Any:
            seconds = random.choice(self.plan.bodies_s)
            end = "returns"
            if request.retries < 2 and random.random() < self.plan.retries:
                end = "retries"
            elif random.random() < self.plan.fails:
                end = "fails"
            return (seconds, end) if (seconds, end) != (0.0, "returns") else None

        seconds, end = self.decisions.choose((f"body {task_id}", number, "body"), draw) or (
            0.0,
            "returns",
        )
        self.scheduler.point("body")
        self._call_from(task_id)
        if seconds:
            self.scheduler.sleep(seconds)
        error: Exception | None = ValueError("this body fails") if end == "fails" else None
        if end == "retries":
            try:
                task.retry(countdown=0.5)
            except (Retry, Reject) as raised:  # it is rejected if its retry cannot be published
                error, end = raised, end if isinstance(raised, Retry) else "fails"
        self.note("body ends", task=task_id, number=number, how=end, holds=self._holds(lock))
        if error is not None:
            raise error
        return f"result of {task_id}"

    def _holds(self, lock: Any) -> bool:
        """Whether the record says, when its body ends, that this delivery runs the task."""
        if lock is None:
            return True
        header = lock._delivery.header
        record = self.store._records.get(header.key) or Record()
        task = record.tasks.get(header.task_id)
        return task is not None and task.delivery == header.delivery

    def _call_from(self, task_id: str) -> None:
        for n, call in enumerate(self.plan.calls):
            if call.in_body and n not in self._made:
                self._made.add(n)
                self._call(n, call, parent=task_id)

    # -- callers -------------------------------------------------------------------------------

    def _caller(self, process: Process, numbers: list[int]) -> Callable[[], None]:
        def run() -> None:
            for n in numbers:
                self._one_call(n)

        return run

    def _one_call(self, n: int) -> None:
        call = self.plan.calls[n]
        until = EPOCH_S + call.at_s
        if until > self.scheduler.now:
            self.scheduler.sleep_until(until)
        if call.after_result >= 0:
            self._await_result(call.after_result)
        self._made.add(n)
        self._call(n, call)

    def _await_result(self, n: int) -> None:
        """Until the result of that call can be read; for a minute at most."""
        gives_up_at = self.scheduler.now + 60.0
        while self.scheduler.now < gives_up_at:
            task_id = self._returned.get(n)
            if task_id is not None and self._has_result(task_id):
                self.note("saw result", task=task_id)
                return
            self._something_returned.wait(1.0)
            self._something_returned.clear()

    def result_stored(self) -> None:
        self._something_returned.set()

    def _has_result(self, task_id: str) -> bool:
        value = self.results.get(f"celery-task-meta-{task_id}")
        return value is not None and json.loads(value)["status"] in states.READY_STATES

    def _call(self, n: int, call: Call, parent: str = "") -> None:
        process = self.scheduler.current.process  # type: ignore[union-attr]
        task = process.app.tasks[LATE if self.plan.late else TASK]
        options = self.plan.options(call)
        if call.countdown_s:
            options["countdown"] = call.countdown_s
        if call.joins:
            options["task_id"] = f"call{n}"
        kwargs = {"values": [f"v{n}"]} if call.strategy == "merge" else {}
        self.note("call begins", call=n, strategy=call.strategy, parent=parent, key=call.key)
        try:
            result = task.apply_async((call.key,), kwargs, **options)
        except DuplicateTask as error:
            self.note("call rejected", call=n, holder=error.task_id or "")
        except (StoreUnavailable, OperationalError) as error:
            self.note("call raised", call=n, error=type(error).__name__)
        else:
            self._returned[n] = result.id
            self.note("call returned", call=n, task=result.id, outcome=result.outcome)

    def _operate(self) -> None:
        for at_s, what, n in self.plan.operator:
            self.scheduler.sleep_until(max(self.scheduler.now, EPOCH_S + at_s))
            self.trace.faults[what] += 1
            process = self.scheduler.current.process  # type: ignore[union-attr]
            app_state = state_of(process.app)
            if what == "release":
                for key in list(self.store._records):
                    released = app_state.store.release(key, None)
                    self.note("operator releases", released=released)
                continue
            task_id = self._returned.get(n)
            if task_id is None:
                continue
            self.note("operator revokes", task=task_id)
            for worker in list(self.workers.values()):
                worker.soon(lambda worker=worker, task_id=task_id: worker.revoked(task_id))
            free_keys(app_state, [task_id])

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> Trace:
        Current.simulation, Current.scheduler = self, self.scheduler
        WorkerState.loaded = None
        header._counter = itertools.count(1)
        self._made: set[int] = set()
        self._something_returned = Wake(lambda: self.scheduler)
        self._in_pool: Counter[tuple[str, str]] = Counter()
        self._outside = Process("outside")
        self._outside.worker_state = WorkerState()
        try:
            self._set_up()
            until = EPOCH_S + LONGEST_S
            try:
                self.trace.ended = self.scheduler.run(self._has_ended, until)
            except NeverEnds as error:
                self.trace.ended, self.trace.left = False, str(error)
            if not self.trace.ended:
                self.trace.left = self.trace.left or self._what_is_left()
            self.note("end", left=self.trace.left)
        finally:
            self.scheduler.close()
        self.trace.points = self.scheduler.points
        self.trace.decisions = dict(self.decisions.made)
        return self.trace

    def _set_up(self) -> None:
        plan = self.plan
        by_process: dict[int, list[int]] = {}
        for n in sorted(range(len(plan.calls)), key=lambda n: plan.calls[n].at_s):
            if not plan.calls[n].in_body:
                by_process.setdefault(plan.calls[n].process, []).append(n)
        self._callers = []
        for number, numbers in sorted(by_process.items()):
            process = self.new_process(f"caller {number}")
            run = self._caller(process, numbers)
            self._callers.append(self.scheduler.spawn(f"caller {number}", process, run))
        for n in range(plan.workers):
            self._start_worker(n)
        if plan.operator:
            process = self.new_process("operator")
            self._callers.append(self.scheduler.spawn("operator", process, self._operate))
        if plan.by_time:
            self.scheduler.spawn("broker", self._outside, self._restore_messages)

    def _restore_messages(self) -> None:
        while True:
            self.scheduler.sleep(5.0)
            self.broker.restore_due()

    def _has_ended(self) -> bool:
        if any(not (actor.is_done or actor.process.is_dead) for actor in self._callers):
            return False
        return not self._what_is_left()

    def _what_is_left(self) -> str:
        """Empty once every message is handled and every key is free."""
        if self.broker.waiting or self.broker.unacknowledged:
            taken = [each.message.task_id for each in self.broker.unacknowledged.values()]
            return f"messages of {[m.task_id for m in self.broker.waiting]} and, taken, {taken}"
        running = sorted(task for (task, _), number in self._in_pool.items() if number > 0)
        if running:
            return f"bodies of {running}"
        now_ms = self.store._now_us() // 1000
        for key in list(self.store._records):
            record = self.store._records[key]
            if record.followers or record.parked:
                return f"followers {sorted(record.followers)}, {record.parked} of them parked"
            record = self.store.read(key)[0]
            record.purge(now_ms)
            # One that is ending blocks no call, and lapses unseen.
            held = {
                i: str(task.stored_state) for i, task in record.tasks.items() if not task.ending
            }
            if held:
                return f"tasks {held} in the record"
        return ""


def kind_of(reply: Any) -> str:
    for name in ("outcome", "verdict"):
        if hasattr(reply, name):
            return str(getattr(reply, name))
    if isinstance(reply, list):
        if reply and isinstance(reply[0], int):
            return str(reply[0])
        return "some" if reply else "none"
    if isinstance(reply, tuple):
        return "record"
    if isinstance(reply, int) and not isinstance(reply, bool):
        return "0" if reply == 0 else "1 or more"
    return "a mark" if type(reply).__name__ == "Mark" else str(reply)[:20]


def task_of(name: str, arguments: tuple[Any, ...]) -> str:
    """The task that an act is about."""
    if name == "renew":
        return " ".join(held.task_id for held in arguments[0])
    if len(arguments) < 2:
        return ""
    task_id = getattr(arguments[1], "task_id", arguments[1])
    return str(task_id) if name != "reap" else ""


def simulate(
    plan: Plan,
    given: Mapping[Key, Any] | None = None,
    store_class: type[MemoryStore] = MemoryStore,
) -> Trace:
    """A run of the plan: with decisions by its seed, or with those that are given."""
    decisions = Decisions(plan.seed if given is None else None, given)
    return Simulation(plan, decisions, store_class).run()
