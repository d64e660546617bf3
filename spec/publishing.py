"""An explicit-state model of the protocol: a few callers and workers on one key.

It covers both ways to publish. On the two-step way a caller acquires, publishes and confirms, and
another caller may help it. On the atomic way one act of the store admits the call and pushes its
message. Requests travel: they can be delayed, and a reply can be lost. ``check`` visits every
reachable state, breadth first, and returns the shortest run that violates an invariant.

Each rule of the protocol has a name in ``RULES`` and can be left out, to show that it is needed.
Time is not modelled: a lease that no living process renews may lapse at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

#: What goes wrong without a rule is shown in ``tests/spec/test_publishing.py``.
RULES = {
    "receipt": "a publish that has pushed leaves a receipt, and pushes nothing when it is repeated",
    "own record": "a repeated publish that finds its own record pushes nothing",
    "push first": "nothing is recorded before the push has succeeded",
    "withdraw refuses": "a publish that arrives after it was withdrawn pushes nothing",
    "attempt": "only the attempt that was withdrawn is refused, not a new call with its id",
    "withdraw its own": "a withdraw leaves the task of another attempt alone",
    "withdraw mark": "the gate drops the message of a task that was withdrawn",
    "withdraw active": "a withdraw leaves a task alone that has started",
    "withdraw duplicates": "a withdraw leaves a task alone that was returned to a duplicate",
    "keep replacement": "a replacing call is not withdrawn: what it replaced is gone",
    "copies": "a plain publish after a time-out says that its message may exist twice",
    "one delivery": "a second delivery of a running task waits",
    "result with finish": "the result can be read only once the key is free",
    "help": "a duplicate of a pending task makes sure that its message is published",
    "help copies": "a helper's copy is recorded, so that the end leaves a done mark",
    "give_back mark": "the gate drops a message whose publish raised",
    "limbo": "a replaced task stays until its replacement is published",
    "confirm pending": "a confirm changes a pending task only",
}

Way = Literal["atomic", "two steps"]


class Call(NamedTuple):
    """One caller of a scenario, and its policy. Its task id is its index."""

    way: Way = "atomic"
    strategy: Literal["ignore", "replace"] = "ignore"
    on_error: Literal["raise", "publish"] = "raise"
    calls_again: bool = False  # with the same id, after the first call raised


class Scenario(NamedTuple):
    """Callers, and how often each fault may happen."""

    calls: tuple[Call, ...]
    workers: int = 2
    late_ack: bool = False
    faults: tuple[tuple[str, int], ...] = ()


class Task(NamedTuple):
    state: str  # p pending, w waiting, r running, e ending
    delivery: int = 0
    copies: bool = False
    by: int = -1  # its replacement, while that is not published
    named: bool = False  # to a duplicate, whose work it is as well


class Request(NamedTuple):
    """An act on its way to the store."""

    act: str  # publish, withdraw, flag
    id: int
    attempt: int
    connection: int = 0
    again: bool = False


class Caller(NamedTuple):
    at: str = "begin"
    attempt: int = 1
    connection: int = 0
    holder: int = -1
    outcome: str = ""  # created, duplicate, rejected, raised, bypassed


class Run(NamedTuple):
    """A delivery in a worker. ``again``: its message may exist twice."""

    id: int
    delivery: int
    again: bool
    at: str = "body"  # then stored (its result, by mistake), ended


class History(NamedTuple):
    """What the invariants need besides the state of the system, for each id."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    results: frozenset[int] = frozenset()
    replaced_by: tuple[int, ...] = ()
    withdrawn: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()  # acknowledged early by a worker that died
    may_repeat: frozenset[int] = frozenset()
    overlap: bool = False  # an exception of the documentation allows a second task
    broken: str = ""


class State(NamedTuple):
    tasks: tuple[Task | None, ...]
    marks: tuple[tuple[str, int], ...]  # kind and attempt, or ("", 0)
    receipts: frozenset[tuple[int, int]]
    queue: tuple[tuple[int, bool], ...]  # id, and whether its header says that copies may exist
    wire: tuple[Request, ...]
    callers: tuple[Caller, ...]
    workers: tuple[Run, ...]
    faults: tuple[tuple[str, int], ...]
    history: History


NO_MARK = ("", 0)
Step = tuple[str, State]


def put(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


class Model:
    def __init__(self, scenario: Scenario, without: str = "") -> None:
        if without and without not in RULES:
            raise ValueError(without)
        self.scenario = scenario
        self.without = without
        self.atomic_only = all(call.way == "atomic" for call in scenario.calls)

    def first(self) -> State:
        n = len(self.scenario.calls)
        nothing = History((0,) * n, (0,) * n, replaced_by=(-1,) * n)
        return State(
            (None,) * n,
            (NO_MARK,) * n,
            frozenset(),
            (),
            (),
            (Caller(),) * n,
            (),
            tuple(sorted(self.scenario.faults)),
            nothing,
        )

    def follows(self, rule: str) -> bool:
        return rule != self.without

    # -- steps ----------------------------------------------------------------

    def steps(self, s: State) -> Iterator[Step]:
        for c in range(len(s.callers)):
            yield from self._caller_steps(s, c)
        for n, request in enumerate(s.wire):
            rest = s._replace(wire=put_out(s.wire, n))
            yield (
                f"store: {request.act} {request.id}.{request.attempt}",
                self._arrive(rest, request),
            )
            if self._may_vanish(s, request):
                yield f"{request.act} {request.id} is lost on its way", rest
        for n, message in enumerate(s.queue):
            if n == 0 or s.queue[n - 1] != message:
                yield from self._deliver(s, n)
        for n in range(len(s.workers)):
            yield from self._worker_steps(s, n)
        yield from self._lapses(s)

    def _fault(self, s: State, kind: str) -> State | None:
        left = dict(s.faults)
        if not left.get(kind):
            return None
        left[kind] -= 1
        return s._replace(faults=tuple(sorted(left.items())))

    # -- the caller -----------------------------------------------------------

    def _caller_steps(self, s: State, c: int) -> Iterator[Step]:
        caller, call = s.callers[c], self.scenario.calls[c]
        if caller.at in ("returned", "dead"):
            return
        if (after := self._fault(s, "caller dies")) is not None:
            yield f"caller {c} dies", set_caller(after, c, caller._replace(at="dead"))
        if caller.at == "begin":
            if call.way == "atomic":
                request = Request("publish", c, caller.attempt, caller.connection)
                yield f"caller {c} sends publish", sent(with_at(s, c, "waits"), request)
            else:
                yield f"caller {c} acquires", self._acquire(s, c)
        elif caller.at == "waits":
            yield from self._no_reply(s, c)
        elif caller.at == "publish":
            yield f"caller {c} publishes", published(with_outcome(s, c, "confirm", "created"), c)
            if (after := self._fault(s, "publish fails")) is not None:
                yield f"publish of {c} fails", with_at(after, c, "give_back")
                yield f"publish of {c} fails, arrived", published(with_at(after, c, "give_back"), c)
        elif caller.at == "confirm":
            yield f"caller {c} confirms", with_at(self._confirm(s, c), c, "returned")
        elif caller.at == "give_back":
            yield (
                f"caller {c} releases",
                with_outcome(self._give_back(s, c), c, "returned", "raised"),
            )
        elif caller.at == "help":
            yield f"caller {c} helps {caller.holder}", self._help(s, c)
        elif caller.at == "copy":
            h = caller.holder
            yield (
                f"caller {c} publishes a copy of {h}",
                published(with_outcome(s, c, "confirm copy", "duplicate"), h),
            )
        elif caller.at == "confirm copy":
            yield (
                f"caller {c} confirms {caller.holder}",
                with_at(self._confirm(s, caller.holder), c, "returned"),
            )

    def _no_reply(self, s: State, c: int) -> Iterator[Step]:
        caller, call = s.callers[c], self.scenario.calls[c]
        if caller.connection == 0 and (after := self._fault(s, "connection lost")) is not None:
            request = Request("publish", c, caller.attempt, 1, again=True)
            caller = caller._replace(connection=1)
            yield f"caller {c} sends publish again", sent(set_caller(after, c, caller), request)
        if (after := self._fault(s, "time-out")) is None:
            return
        if call.on_error == "publish":
            # The first message, if there is one, says nothing of a second: the store's record is
            # flagged, unless the task has finished by then.
            after = published(after, c, self.follows("copies"))
            if self.follows("copies"):
                after = sent(after, Request("flag", c, caller.attempt))
            after = excused(after, overlap=True, may_repeat=c if s.history.ends[c] else -1)
            yield (
                f"caller {c} publishes without reply",
                with_outcome(after, c, "returned", "bypassed"),
            )
            return
        if call.strategy != "replace" or not self.follows("keep replacement"):
            after = sent(after, Request("withdraw", c, caller.attempt))
        caller = caller._replace(at="returned", outcome="raised")
        if call.calls_again and caller.attempt == 1:
            caller = Caller(attempt=2)
            may_repeat = after.history.may_repeat | {c}  # two calls, one after the other
            after = after._replace(history=after.history._replace(may_repeat=may_repeat))
        yield f"call {c} times out", set_caller(after, c, caller)

    def _may_vanish(self, s: State, request: Request) -> bool:
        """A request on a closed connection; also a background act of a process that died."""
        caller = s.callers[request.id]
        if request.act != "publish":
            return caller.at == "dead"
        waits = caller.at == "waits" and caller.attempt == request.attempt
        return not (waits and caller.connection == request.connection)

    # -- acts of the store ----------------------------------------------------

    def _arrive(self, s: State, request: Request) -> State:
        if request.act == "withdraw":
            return self._withdraw(s, request)
        if request.act == "flag":
            task = s.tasks[request.id]
            return s if task is None else set_task(s, request.id, task._replace(copies=True))
        s, outcome, holder = self._publish(s, request)
        caller = s.callers[request.id]
        hears = caller.at == "waits" and caller.attempt == request.attempt
        if not hears or caller.connection != request.connection:
            return s
        return self._replied(s, request.id, outcome, holder)

    def _replied(self, s: State, c: int, outcome: str, holder: int) -> State:
        at = "returned"
        if outcome == "duplicate" and self.follows("help"):
            task = s.tasks[holder]
            if task is not None and task.state == "p":
                at = "help"
        caller = s.callers[c]._replace(at=at, outcome=outcome, holder=holder)
        if at == "help":
            caller = caller._replace(outcome="")
        return set_caller(s, c, caller)

    def _publish(self, s: State, request: Request) -> tuple[State, str, int]:
        """Lock and message in one act."""
        c, own = request.id, s.tasks[request.id]
        pushed = (c, request.attempt) in s.receipts
        if request.again and pushed and self.follows("receipt"):
            return s, "created", -1
        if pushed and not request.again:
            # Delayed beyond its own repetition, which read no receipt; it reads none either.
            s = excused(s, may_repeat=c)
        kind, attempt = s.marks[c]
        refused = attempt == request.attempt or not self.follows("attempt")
        if kind == "withdrawn" and refused and self.follows("withdraw refuses"):
            return s, "created", -1
        if own is not None:
            if not request.again:
                return named(s, c), "duplicate", c
            if self.follows("own record"):
                # Perhaps that of an earlier call with this id, which must not be withdrawn now.
                return named(s, c), "created", -1
            return published(s, c), "created", -1
        blockers = blocking(s)
        replaces = self.scenario.calls[c].strategy == "replace"
        if blockers and (not replaces or any(s.tasks[b].state == "r" for b in blockers)):  # type: ignore[union-attr]
            if replaces:
                return s, "rejected", blockers[-1]
            return named(s, blockers[-1]), "duplicate", blockers[-1]
        if (refusing := self._fault(s, "push refused")) is not None and c == 0:
            if self.follows("push first"):
                return refusing, "raised", -1
            return set_task(refusing, c, Task("w")), "raised", -1
        for b in blockers:
            s = supersede(s, b, c)
        s = set_task(s, c, Task("w", copies=kind != ""))
        s = set_mark(s, c, NO_MARK)
        # A plain publish was made meanwhile, and may have run: its copy is not known to the store.
        if s.callers[c].outcome == "bypassed" or kind == "done":
            s = excused(s, may_repeat=c)
        s = s._replace(receipts=s.receipts | {(c, request.attempt)})
        return published(s, c), "created", -1

    def _withdraw(self, s: State, request: Request) -> State:
        c, task = request.id, s.tasks[request.id]
        pushed = (c, request.attempt) in s.receipts
        mark = ("withdrawn", request.attempt)
        if task is None:
            if pushed or s.marks[c] != NO_MARK:
                return s  # it has ended, or was replaced
            return withdrawn(set_mark(s, c, mark), c, request.attempt)
        if not pushed and self.follows("withdraw its own"):
            return s
        if task.state != "w" and self.follows("withdraw active"):
            return s
        if task.named and self.follows("withdraw duplicates"):
            return s
        s = set_task(s, c, None)
        if self.follows("withdraw mark"):
            s = set_mark(s, c, mark)
        return withdrawn(s, c, request.attempt)

    def _acquire(self, s: State, c: int) -> State:
        blockers = blocking(s)
        replaces = self.scenario.calls[c].strategy == "replace"
        if blockers and (not replaces or any(s.tasks[b].state == "r" for b in blockers)):  # type: ignore[union-attr]
            if replaces:
                return self._replied(s, c, "rejected", blockers[-1])
            return self._replied(named(s, blockers[-1]), c, "duplicate", blockers[-1])
        for b in blockers:
            task = s.tasks[b]
            assert task is not None
            s = set_task(s, b, task._replace(by=c)) if self.follows("limbo") else supersede(s, b, c)
        s = set_task(s, c, Task("p", copies=s.marks[c] != NO_MARK))
        return with_at(set_mark(s, c, NO_MARK), c, "publish")

    def _confirm(self, s: State, c: int) -> State:
        task = s.tasks[c]
        if task is None or (task.state != "p" and self.follows("confirm pending")):
            return s
        return finalised(set_task(s, c, task._replace(state="w", delivery=0)), c)

    def _give_back(self, s: State, c: int) -> State:
        task = s.tasks[c]
        if task is None or task.state != "p" or task.copies:
            return s
        s = removed(s, c)
        return set_mark(s, c, ("withdrawn", 0)) if self.follows("give_back mark") else s

    def _help(self, s: State, c: int) -> State:
        holder = s.callers[c].holder
        task = s.tasks[holder]
        if task is None:
            done = s.marks[holder][0] == "done"
            return with_outcome(s, c, "returned", "duplicate") if done else with_at(s, c, "begin")
        if task.state != "p":
            return with_outcome(s, c, "returned", "duplicate")
        if in_limbo(s, task):
            return with_at(s, c, "begin")
        if self.follows("help copies"):
            s = set_task(s, holder, task._replace(copies=True))
        return with_at(s, c, "copy")

    # -- the worker -----------------------------------------------------------

    def _deliver(self, s: State, n: int) -> Iterator[Step]:
        c, again = s.queue[n]
        if len(s.workers) == self.scenario.workers:
            return
        taken = s._replace(queue=put_out(s.queue, n))
        kind, task = s.marks[c][0], s.tasks[c]
        if kind:
            yield f"gate drops {c}: {kind}", taken
            return
        if task is not None:
            alive = any((r.id, r.delivery) == (c, task.delivery) for r in s.workers)
            if task.delivery and alive and self.follows("one delivery"):
                if not task.copies:
                    yield f"gate holds {c}", set_task(s, c, task._replace(copies=True))
                return
            if in_limbo(s, task):
                return
        delivery = s.history.starts[c] + 1
        copies = task is not None and (task.copies or task.delivery > 0)
        starts = put(s.history.starts, c, delivery)
        after = taken._replace(
            workers=tuple(sorted((*s.workers, Run(c, delivery, again)))),
            history=s.history._replace(starts=starts),
        )
        if c in s.history.withdrawn:
            after = broken(after, f"{c} was withdrawn and runs")
        task = Task("r", delivery, copies, named=task is not None and task.named)
        yield f"{c} starts", finalised(set_task(after, c, task), c)

    def _worker_steps(self, s: State, n: int) -> Iterator[Step]:
        run = s.workers[n]
        idle = s._replace(workers=put_out(s.workers, n))
        if (after := self._fault(idle, "worker dies")) is not None:
            if self.scenario.late_ack:
                after = published(excused(after, may_repeat=run.id), run.id, True)
            else:  # at most once, if there is no copy
                lost = after.history.lost | {run.id} if run.at != "ended" else after.history.lost
                after = after._replace(history=after.history._replace(lost=lost))
                after = excused(after, may_repeat=run.id)
            yield f"worker of {run.id} dies", after
        if run.at == "body":
            if self.follows("result with finish"):
                yield f"{run.id} ends", self._finish(with_result(s, run.id), n)
            else:
                moved = tuple(sorted((*idle.workers, run._replace(at="stored"))))
                yield f"{run.id} stores", with_result(s, run.id)._replace(workers=moved)
        elif run.at == "stored":
            yield f"{run.id} ends", self._finish(s, n)
        else:
            yield f"{run.id} is settled", self._settle(idle, run)

    def _finish(self, s: State, n: int) -> State:
        """The body has returned: release the key, and store the result in the same act."""
        run = s.workers[n]
        task = s.tasks[run.id]
        ends = put(s.history.ends, run.id, s.history.ends[run.id] + 1)
        s = s._replace(workers=put_out(s.workers, n), history=s.history._replace(ends=ends))
        flags = [r for r in s.wire if r.act == "flag" and r.id == run.id]
        if flags and not run.again:
            s = excused(s, may_repeat=run.id)  # it has finished before it could be flagged
        if task is None or task.delivery != run.delivery:
            return s  # not this delivery's
        if not (self.scenario.late_ack or task.copies or run.again):
            return set_task(s, run.id, None)
        workers = tuple(sorted((*s.workers, run._replace(at="ended"))))
        return set_task(s, run.id, task._replace(state="e"))._replace(workers=workers)

    def _settle(self, s: State, run: Run) -> State:
        task = s.tasks[run.id]
        if task is None or task.state != "e" or task.delivery != run.delivery:
            return s
        marked = task.copies or run.again
        s = set_task(s, run.id, None)
        return set_mark(s, run.id, ("done", 0)) if marked else s

    # -- leases ---------------------------------------------------------------

    def _lapses(self, s: State) -> Iterator[Step]:
        for c, task in enumerate(s.tasks):
            if task is None:
                continue
            if task.delivery:
                alive = any((r.id, r.delivery) == (c, task.delivery) for r in s.workers)
                if not alive and not any(message[0] == c for message in s.queue):
                    yield f"lease of {c} lapses", removed(s, c)
            elif task.state == "p" and self._no_one_confirms(s, c):
                after = removed(s, c)
                if any(message[0] == c for message in s.queue):
                    after = excused(after, may_repeat=c)
                yield f"grace of {c} lapses", after
        if s.receipts and (after := self._fault(s, "receipt lapses")) is not None:
            for receipt in s.receipts:
                # A caller that was suspended for so long repeats a publish that may have ended.
                gone = after._replace(receipts=after.receipts - {receipt})
                gone = excused(gone, may_repeat=receipt[0])
                yield f"receipt of {receipt[0]} lapses", gone

    def _no_one_confirms(self, s: State, c: int) -> bool:
        helps = any(
            caller.holder == c and caller.at.startswith(("cop", "conf")) for caller in s.callers
        )
        return s.callers[c].at in ("dead", "returned") and not helps

    # -- invariants -----------------------------------------------------------

    def violation(self, s: State) -> str:
        if s.history.broken:
            return s.history.broken
        bodies = [run.id for run in s.workers if run.at == "body"]
        if len(set(bodies)) < len(bodies):
            return f"one task runs twice at a time: {bodies}"
        if len(bodies) > 1 and not s.history.overlap:
            return f"two bodies of one key at a time: {bodies}"
        for c, ends in enumerate(s.history.ends):
            if ends > 1 and c not in s.history.may_repeat:
                return f"{c} ran {ends} times"
            task = s.tasks[c]
            if c in s.history.results and task is not None and not ends:
                return f"the result of {c} can be read while {c} holds the key"
        return self._torn(s) if self.atomic_only else ""

    def _torn(self, s: State) -> str:
        """On the atomic way there is no lock without a message and no message without a lock."""
        messages = {message[0] for message in s.queue}
        for c, task in enumerate(s.tasks):
            if task is not None and task.state == "w" and c not in messages:
                return f"{c} has a lock and no message"
            bypassed = s.callers[c].outcome == "bypassed"
            if c in messages and task is None and s.marks[c] == NO_MARK and not bypassed:
                return f"{c} has a message and no lock"
        return ""

    def final_violation(self, s: State) -> str:
        """What must hold when nothing can happen any more."""
        for c, task in enumerate(s.tasks):
            if task is not None:
                return f"the key stays held by {c}"
        if s.queue:
            return f"messages stay: {s.queue}"
        for c, caller in enumerate(s.callers):
            if caller.outcome in ("created", "bypassed") and not has_outcome(s, c):
                return f"call {c} was accepted and is lost"
            if caller.outcome == "duplicate" and not has_outcome(s, caller.holder):
                return f"call {c} is a duplicate of {caller.holder}, which is lost"
        for c, by in enumerate(s.history.replaced_by):
            if by >= 0 and s.callers[c].outcome == "created" and not has_outcome(s, c):
                return f"{c} was replaced by {by}, and neither runs"
        return ""


# -- changes of a state -------------------------------------------------------


def put_out(values: tuple, index: int) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], *values[index + 1 :])


def set_task(s: State, c: int, task: Task | None) -> State:
    return s._replace(tasks=put(s.tasks, c, task))


def set_mark(s: State, c: int, mark: tuple[str, int]) -> State:
    return s._replace(marks=put(s.marks, c, mark))


def set_caller(s: State, c: int, caller: Caller) -> State:
    return s._replace(callers=put(s.callers, c, caller))


def with_at(s: State, c: int, at: str) -> State:
    return set_caller(s, c, s.callers[c]._replace(at=at))


def with_outcome(s: State, c: int, at: str, outcome: str) -> State:
    return set_caller(s, c, s.callers[c]._replace(at=at, outcome=outcome))


def sent(s: State, request: Request) -> State:
    return s._replace(wire=tuple(sorted((*s.wire, request))))


def published(s: State, c: int, copies: bool = False) -> State:
    return s._replace(queue=tuple(sorted((*s.queue, (c, copies)))))


def with_result(s: State, c: int) -> State:
    return s._replace(history=s.history._replace(results=s.history.results | {c}))


def broken(s: State, text: str) -> State:
    return s._replace(history=s.history._replace(broken=text))


def withdrawn(s: State, c: int, attempt: int) -> State:
    """The call raised, and its task must not run; unless it is called again with its id."""
    if s.callers[c].attempt != attempt:
        return s
    return s._replace(history=s.history._replace(withdrawn=s.history.withdrawn | {c}))


def excused(s: State, overlap: bool = False, may_repeat: int = -1) -> State:
    """An exception of the documentation applies from here on."""
    history = s.history
    if overlap:
        history = history._replace(overlap=True)
    if may_repeat >= 0:
        # What runs again may run beside the next task.
        history = history._replace(may_repeat=history.may_repeat | {may_repeat}, overlap=True)
    return s._replace(history=history)


def named(s: State, c: int) -> State:
    """Count a duplicate of the task."""
    task = s.tasks[c]
    assert task is not None
    return set_task(s, c, task._replace(named=True))


def blocking(s: State) -> list[int]:
    return [
        c
        for c, task in enumerate(s.tasks)
        if task is not None and task.state in "pwr" and not in_limbo(s, task)
    ]


def in_limbo(s: State, task: Task) -> bool:
    return task.by >= 0 and s.tasks[task.by] is not None


def supersede(s: State, c: int, by: int) -> State:
    s = set_mark(set_task(s, c, None), c, ("superseded", 0))
    for below, task in enumerate(s.tasks):
        if task is not None and task.by == c and task.state != "r":
            s = supersede(s, below, by)
    replaced_by = put(s.history.replaced_by, c, by)
    return s._replace(history=s.history._replace(replaced_by=replaced_by))


def finalised(s: State, c: int) -> State:
    """The task is published or runs: what it replaces is gone."""
    for other, task in enumerate(s.tasks):
        if task is not None and task.by == c and task.state != "r":
            s = supersede(s, other, c)
    return s


def removed(s: State, c: int) -> State:
    """The task will not run: restore what it replaced."""
    task = s.tasks[c]
    assert task is not None
    for other, below in enumerate(s.tasks):
        if below is not None and below.by == c:
            s = set_task(s, other, below._replace(by=task.by))
    return set_task(s, c, None)


def has_outcome(s: State, c: int) -> bool:
    """It ran; or a later call that replaced it did; or it died in a worker, acknowledged."""
    if s.history.ends[c] or c in s.history.lost:
        return True
    by = s.history.replaced_by[c]
    return by >= 0 and has_outcome(s, by)


# -- the search ---------------------------------------------------------------


class Checked(NamedTuple):
    states: int
    violation: str
    run: tuple[str, ...]


def check(scenario: Scenario, without: str = "", most: int = 500_000) -> Checked:
    """Visit every state, breadth first; stop at the first violation."""
    model = Model(scenario, without)
    first = model.first()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    level = [first]
    while level:
        following: list[State] = []
        for state in level:
            violation = model.violation(state)
            ends = True
            for label, reached in () if violation else model.steps(state):
                ends = False
                if reached not in came_from:
                    came_from[reached] = (state, label)
                    following.append(reached)
            if ends:
                violation = violation or model.final_violation(state)
            if violation:
                return Checked(len(came_from), violation, tuple(run_to(came_from, state)))
        if len(came_from) > most:
            raise RuntimeError(f"more than {most} states")
        level = following
    return Checked(len(came_from), "", ())


def run_to(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    labels = []
    while (before := came_from[state]) is not None:
        state, label = before
        labels.append(label)
    return labels[::-1]
