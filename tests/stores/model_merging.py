"""Merged calls as the design describes them, in plain Python, as in ``model``.

Of a task it knows the calls that it runs for, in their order. Time is in minutes; leases are the
same for every task, and no call names states of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GRACE, QUEUE, RUN = 2, 30, 5


@dataclass
class Task:
    id: str
    state: str  # pending, available, active, retryable, ending
    created_at: int
    lease: int
    eta: int | None = None
    after: str | None = None
    #: Ids of calls, each with its value.
    values: list[tuple[str, int]] = field(default_factory=list)
    merged: int = 0
    delivery: str | None = None
    delivery_lease: int = 0
    copies: bool = False
    released: bool = False

    @property
    def started(self) -> bool:
        return self.state not in ("pending", "available")


class MergingModel:
    def __init__(self) -> None:
        self.now = 0
        self.tasks: list[Task] = []
        self.marks: dict[str, tuple[str, int]] = {}
        #: Values of tasks whose lease has lapsed: their messages may still arrive.
        self.lapsed: dict[str, list[tuple[str, int]]] = {}

    def advance(self, minutes: int) -> None:
        self.now += minutes
        for task in [task for task in self.tasks if task.lease <= self.now]:
            self.tasks.remove(task)
            self.lapsed[task.id] = task.values
        self.marks = {i: mark for i, mark in self.marks.items() if mark[1] > self.now}

    def task(self, task_id: str) -> Task | None:
        return next((task for task in self.tasks if task.id == task_id), None)

    # -- the caller ---------------------------------------------------------------------

    def call(
        self, call_id: str, value: int, *, limit: int, delay: int | None, max_wait: int | None
    ) -> tuple[str, str | None]:
        """The outcome, and the task that it is about: the holder, or the one that it comes after.
        ``limit``: how many values one run gets."""
        own = self.task(call_id)
        if own is not None and own.state != "ending":
            if own.started or len(own.values) >= limit:
                return "rejected", own.id
            self._merge(own, call_id, value, delay, max_wait)
            return "merged", own.id
        live = [task for task in self.tasks if task.state != "ending" and not task.released]
        last = live[-1] if live else None
        for _ in live:  # what is to run after it is later in line, however old it is
            last = next((task for task in live if last and task.after == last.id), last)
        if last is not None and not last.started and len(last.values) < limit:
            self._merge(last, call_id, value, delay, max_wait)
            return "merged", last.id
        known_before = self.marks.pop(call_id, None) is not None or own is not None
        if own is not None:
            self.tasks.remove(own)
        task = Task(call_id, "pending", self.now, self.now + GRACE, copies=known_before)
        task.values.append((call_id, value))
        task.eta = None if delay is None else self.now + delay
        task.after = last.id if last is not None else None
        for other in self.tasks:
            if other.after == call_id:  # it waited for an earlier task of this id
                other.after = None
        self.tasks.append(task)
        self.lapsed.pop(call_id, None)
        return "created", task.after

    def _merge(
        self, task: Task, call_id: str, value: int, delay: int | None, max_wait: int | None
    ) -> None:
        task.merged += 1
        task.values.append((call_id, value))
        if delay is None or task.eta is None or task.eta <= self.now:
            return
        eta = self.now + delay
        if max_wait is not None:
            eta = min(eta, task.created_at + max_wait)
        if eta > task.eta:
            if task.state == "available":
                task.lease += eta - task.eta
            task.eta = eta

    def confirm(self, task_id: str) -> None:
        task = self.task(task_id)
        if task is not None and task.state == "pending":
            task.state, task.lease = "available", max(self.now, task.eta or 0) + QUEUE

    def give_back(self, task_id: str) -> bool:
        task = self.task(task_id)
        if task is None or task.started:
            return False
        if task.merged:
            own = next((value for value in task.values if value[0] == task_id), None)
            if own is not None:
                task.values.remove(own)
            return False
        if task.copies or task.state != "pending":
            return False
        self.tasks.remove(task)
        self.marks[task_id] = ("withdrawn", self.now + QUEUE)
        return True

    def unmerge(self, call_id: str) -> bool:
        for task in self.tasks:
            if task.started or task.id == call_id:
                continue
            found = next((value for value in task.values if value[0] == call_id), None)
            if found is not None:
                task.values.remove(found)
                return True
        return False

    def cancel(self, task_id: str) -> str:
        task = self.task(task_id)
        if task is not None:
            alive = task.state == "active" and task.delivery_lease > self.now
            if alive or task.state == "ending":
                return "active"
            self.tasks.remove(task)
        elif self.marks.get(task_id, ("",))[0] == "done":
            return "active"
        until = max(self.now + QUEUE, self.marks.get(task_id, ("", 0))[1])
        self.marks[task_id] = ("revoked", until)
        return "cancelled"

    def release(self, task_id: str) -> int:
        task = self.task(task_id)
        if task is None or task.released:
            return 0
        task.released = True
        return 1

    # -- the worker ---------------------------------------------------------------------

    def start(self, task_id: str, delivery: str) -> tuple[str, list[int] | None]:
        """The verdict, and what the body runs with, where it is not what its message says."""
        if task_id in self.marks:
            return "done" if self.marks[task_id][0] == "done" else "superseded", None
        task = self.task(task_id)
        if task is None:
            task = Task(task_id, "active", self.now, self.now + RUN)
            task.values = self.lapsed.pop(task_id, [])
            self.tasks.append(task)
            lease = RUN
        else:
            if task.delivery == delivery:
                return ("done", None) if task.state == "ending" else ("run", self._values(task))
            if task.delivery is not None and task.delivery_lease > self.now:
                task.copies = True
                return "wait", None
            before = self.task(task.after) if task.after else None
            if before is not None and before.state != "ending" and not before.released:
                return "wait", None
            if not task.started and task.eta is not None and task.eta > self.now:
                return "wait", None
            task.copies = task.copies or task.delivery is not None
            lease = QUEUE
        task.state, task.after, task.delivery = "active", None, delivery
        task.lease, task.delivery_lease = self.now + lease, self.now + RUN
        return "run", self._values(task)

    def _values(self, task: Task) -> list[int] | None:
        return [value for _, value in task.values] or None

    def retry(self, task_id: str, delivery: str) -> None:
        task = self.task(task_id)
        if task is not None and task.state == "active" and task.delivery == delivery:
            task.state, task.delivery, task.delivery_lease = "retryable", None, 0
            task.lease = self.now + QUEUE

    def finish(self, task_id: str, delivery: str, later: bool) -> str:
        task = self.task(task_id)
        if task is None or (task.state == "ending" and task.delivery != delivery):
            return "not_yours"
        if task.delivery not in (None, delivery):
            return "not_yours"
        if task.state != "ending" and (later or task.copies):
            task.state, task.delivery = "ending", delivery
        elif task.state != "ending":
            self.tasks.remove(task)
        return "ended"

    def settle(self, task_id: str, delivery: str) -> None:
        task = self.task(task_id)
        if task is not None and task.state == "ending" and task.delivery == delivery:
            self.tasks.remove(task)
            if task.copies:
                self.marks[task_id] = ("done", self.now + QUEUE)
