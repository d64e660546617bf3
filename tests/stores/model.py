"""A lock store as the design describes it, in the plainest Python that says it.

Written from the sentences of the design (states, windows) and of the protocol (the
record of one key, the acts of the caller and of the worker), and from nothing else:
it shares no code with any store. Tasks and marks are dictionaries in two lists, states
go by their whole names, and time stands still until ``advance`` moves it. Times are
numbers since the model was made, in whatever unit the user of the model chooses.

Where the sentences leave a choice, any choice is accepted: ``acquire`` answers with
every task that may be named, and the store's own choice is told with ``count_duplicate``;
for a task that it created, with every predecessor that it may have, and the store's own
choice is told with ``place``, and that of the ETA with ``note_eta``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.stores.model_following import FollowingModel
from tests.stores.model_lanes import LanesModel

Task = dict[str, Any]
Mark = dict[str, Any]

FINAL = ("completed", "discarded", "cancelled")
EVERY_STATE = ("pending", "scheduled", "available", "active", "retryable", *FINAL)


@dataclass
class Answer:
    """What ``acquire`` may answer."""

    outcome: str
    may_be_named: list[str] = field(default_factory=list)  # as the holder
    may_come_after: list[str | None] = field(default_factory=lambda: [None])
    waiting: list[Task] = field(default_factory=list)  # those it replaces, but a predecessor
    keeps_schedule: bool = False
    max_wait: int | None = None
    asked_before: bool = False  # it follows already: nothing is counted


class Model(LanesModel, FollowingModel):
    def __init__(self) -> None:
        FollowingModel.__init__(self)
        LanesModel.__init__(self)
        self.now = 0
        self.tasks: list[Task] = []
        self.marks: list[Mark] = []

    def advance(self, by: int) -> None:
        """Time passes. What has lapsed is as if it had never been."""
        self.now += by
        for lapsed in [task for task in self.tasks if task["lease"] <= self.now]:
            self._hand_on(lapsed)
            self._remove_task(lapsed["key"], lapsed["id"])
        self.marks = [mark for mark in self.marks if mark["until"] > self.now]
        self.forget_followers_nobody_looked_after()

    # -- what is there ------------------------------------------------------

    def tasks_of(self, key: str) -> list[Task]:
        return [task for task in self.tasks if task["key"] == key]

    def marks_of(self, key: str) -> list[Mark]:
        return [mark for mark in self.marks if mark["key"] == key]

    def task(self, key: str, task_id: str) -> Task | None:
        found = [task for task in self.tasks_of(key) if task["id"] == task_id]
        return found[0] if found else None

    def mark(self, key: str, task_id: str) -> Mark | None:
        found = [mark for mark in self.marks_of(key) if mark["id"] == task_id]
        return found[0] if found else None

    def shown_state(self, task: Task) -> str:
        """Scheduled is told by time."""
        if task["state"] == "available" and self.eta_lies_ahead(task):
            return "scheduled"
        state: str = task["state"]
        return state

    def eta_lies_ahead(self, task: Task) -> bool:
        return task["eta"] is not None and task["eta"] > self.now

    # -- limbo: another task, not yet published, stands in ------------------

    def in_limbo(self, task: Task) -> bool:
        """``by`` names a task that is live, or is itself in limbo."""
        replacement = self.task(task["key"], task["by"]) if task["by"] else None
        if replacement is None:
            return False
        return not replacement["released"] or self.in_limbo(replacement)

    def under(self, key: str, task_id: str) -> list[Task]:
        """What is in limbo under a task, down the chain."""
        direct = [task for task in self.tasks_of(key) if task["by"] == task_id]
        return direct + [below for task in direct for below in self.under(key, task["id"])]

    def _finalise(self, key: str, task_id: str, mark_for: int) -> None:
        for task in self.under(key, task_id):
            if task["state"] == "active":
                continue
            self._remove_task(key, task["id"])
            # Its message is still out there, for as long as it was to be waited for.
            for_so_long = max(mark_for, task["lease"] - self.now)
            self._set_mark(
                key, task["id"], "superseded", for_so_long, by=task_id, lasting=task["copies"]
            )
            self.follow_instead(key, task["id"], task_id)

    def _bring_back(self, task: Task, lease: int) -> None:
        """The task will not run: those in limbo under it are live again, for a fresh lease."""
        for other in self._hand_on(task):
            if other["by"] is None and other["state"] in ("available", "retryable"):
                other["lease"] = max(other["lease"], self.now + lease)

    def _hand_on(self, task: Task) -> list[Task]:
        """Who was in limbo under it now is under what it is itself in limbo under."""
        below = [other for other in self.tasks_of(task["key"]) if other["by"] == task["id"]]
        for other in below:
            other["by"] = task["by"]
        return below

    # -- acts of the caller -------------------------------------------------

    def acquire(
        self,
        key: str,
        task_id: str,
        *,
        states: set[str],
        on_conflict: str,
        grace: int,
        window: int | None,
        delay: int | None,
        keep_for: int | None,
        arguments: str,
        again: bool,
        parent: str | None,
        max_wait: int | None,
        join: bool,
        limit: int = 1,
        max_queue: int | None = None,
    ) -> Answer:
        queues = on_conflict == "queue"
        if queues and self.in_lane(key, task_id) is not None:
            named = self.blockers(key, states=states, window=window)
            own = self.task(key, task_id)
            if own is not None and own not in named:
                named.append(own)
            return Answer("queued", self._may_be_named(named), asked_before=True)
        joined_to = self.already_joined(key, task_id) if join and not queues else None
        if joined_to is not None:
            return Answer("joined", may_be_named=[joined_to], asked_before=True)
        if again and self._goes_on(key, task_id, grace):
            return self._as_it_was(key, task_id)
        refused = "duplicate" if on_conflict in ("ignore", "rerun", "queue") else "rejected"
        own = self.task(key, task_id)
        if own is not None and own["state"] not in FINAL:
            return Answer(refused, may_be_named=[task_id])  # the holder's own id
        blockers = self.blockers(key, states=states, window=window)
        if queues:
            if len(blockers) >= limit or self.lane_waits(key):
                named = self._may_be_named(blockers)
                if max_queue is not None and len(self.parked(key)) >= max_queue:
                    return Answer("full", named, asked_before=True)
                known = bool(own or self.mark(key, task_id))
                self._remove_mark(key, task_id)
                self._remove_task(key, task_id)
                self._forget_follower(key, task_id)
                self.lane.append(
                    {
                        "key": key,
                        "id": task_id,
                        "called": False,
                        "states": states,
                        "window": window,
                        "limit": limit,
                        "grace": grace,
                        "eta": None if delay is None else self.now + delay,
                        "keep": {state for state in FINAL if state in states},
                        "kept_for": window if keep_for is None else keep_for,
                        "arguments": arguments,
                        "copies": known,
                        "joined_at": self.now,
                    }
                )
                self.look_after(key)
                return Answer("queued", named)
            blockers = []  # within its limit
        # Behind an idempotency key: other work, or the same work and done.
        kept = [
            task
            for task in blockers
            if task["arguments"] != arguments or (arguments and task["state"] in FINAL)
        ]
        if kept:
            return Answer(refused, may_be_named=self._newest(kept))
        active = [task for task in blockers if task["state"] == "active"]
        waiting = [t for t in blockers if t["state"] in ("pending", "available", "retryable")]
        if limit > 1 and not queues:
            if len(blockers) < limit:
                blockers, active, waiting = [], [], []
            elif on_conflict.startswith("replace"):
                # As many of the oldest as there are too many; ended ones take no place.
                waiting.sort(key=lambda task: task["created_at"])
                over = max(0, len(active) + len(waiting) - limit + 1)
                if over <= len(waiting):
                    waiting = waiting[:over]
                    blockers, active = waiting, []
            elif (
                on_conflict == "rerun"
                and len(active) < limit
                and parent not in [task["id"] for task in active]
            ):
                blockers, active = waiting or blockers, []
                return Answer(refused, may_be_named=self._newest(blockers))
            else:
                waiting = [task for task in waiting if task["after"]]
        replaces = on_conflict.startswith("replace") and not active
        predecessors: list[str | None] = [None]
        if parent in [task["id"] for task in active]:
            predecessors = [parent]
        elif on_conflict == "rerun" and active:
            predecessors = [*self._newest(active)]
        elif replaces and max_wait is not None:
            predecessors = [*self._oldest_overdue(waiting, max_wait)] or [None]
        if blockers and predecessors == [None] and not replaces:
            return Answer(refused, may_be_named=self._may_be_named(blockers))
        # What a call promises beyond its window lasts from its creation too.
        kept = window if keep_for is None else keep_for
        # Another message of this id may still be under way.
        known_before = self.mark(key, task_id) or self.task(key, task_id)
        self._remove_mark(key, task_id)
        self._remove_task(key, task_id)
        self.tasks.append(
            {
                "key": key,
                "id": task_id,
                "state": "pending",
                "created_at": self.now,
                "lease": self.now + grace,
                "window_ends": None if kept is None else self.now + kept,
                "eta": None if delay is None else self.now + delay,
                "keep": {state for state in FINAL if state in states},
                "arguments": arguments,
                "duplicates": 0,
                "last_duplicate_at": None,
                "delivery": None,
                "delivery_lease": None,
                "token": None,
                "copies": known_before is not None,
                "ending": False,
                "released": False,
                "by": None,
                "after": None,
                "since": None,
            }
        )
        self.stop_following(key, task_id)  # it is on its own
        self.look_after(key)
        keeps_schedule = on_conflict == "replace_except_schedule"
        return Answer(
            "created",
            may_come_after=predecessors,
            waiting=waiting,
            keeps_schedule=keeps_schedule,
            max_wait=max_wait,
        )

    def blockers(self, key: str, *, states: set[str], window: int | None) -> list[Task]:
        return [
            task
            for task in self.tasks_of(key)
            if self._blocks(task, states=states, window=window) and not self.in_limbo(task)
        ]

    def _as_it_was(self, key: str, task_id: str) -> Answer:
        task = self.task(key, task_id)
        return Answer("created", may_come_after=[None if task is None else task["after"]])

    def place(
        self, key: str, task_id: str, answer: Answer, after: str | None
    ) -> tuple[list[str], list[int | None]]:
        """The store has chosen whom a task comes after: whom it replaces, and its ETAs."""
        task = self.task(key, task_id)
        if task is None:  # it is over
            return [], [None]
        task["after"] = after
        replaced = [other for other in answer.waiting if other["id"] != after]
        for other in replaced:
            other["by"] = task_id
        etas = [task["eta"]]
        if replaced:
            since = min(self._waits_since(other) for other in replaced)
            task["since"] = since
            if answer.keeps_schedule:
                etas = self._kept_schedules(replaced) or etas
            if answer.max_wait is not None:
                etas = [self._not_beyond(eta, since + answer.max_wait) for eta in etas]
        return sorted(other["id"] for other in self.under(key, task_id)), etas

    def note_eta(self, key: str, task_id: str, eta: int | None) -> None:
        task = self.task(key, task_id)
        if task is not None:
            task["eta"] = eta

    def _waits_since(self, task: Task) -> int:
        """The creation of the first of the tasks that replaced each other."""
        since: int = task["created_at"] if task["since"] is None else task["since"]
        return since

    def _oldest_overdue(self, waiting: list[Task], max_wait: int) -> list[str]:
        """Published and due, and pushed back for so long that nothing may replace it."""
        overdue = [
            task
            for task in waiting
            if task["state"] != "retryable"
            and not self.eta_lies_ahead(task)
            and self._waits_since(task) + max_wait <= self.now
        ]
        oldest = min((task["created_at"] for task in overdue), default=None)
        return [task["id"] for task in overdue if task["created_at"] == oldest]

    def _kept_schedules(self, waiting: list[Task]) -> list[int | None]:
        scheduled = [task for task in waiting if self.eta_lies_ahead(task)]
        newest = max((task["created_at"] for task in scheduled), default=None)
        return [task["eta"] for task in scheduled if task["created_at"] == newest]

    def _not_beyond(self, eta: int | None, latest: int) -> int | None:
        if eta is None or eta <= latest:
            return eta
        return latest if latest > self.now else None  # at once

    def _goes_on(self, key: str, task_id: str, grace: int) -> bool:
        """The same attempt asks again: it was admitted already, nothing new begins."""
        task, mark = self.task(key, task_id), self.mark(key, task_id)
        if task is not None:
            if task["state"] == "pending":
                task["lease"] = max(task["lease"], self.now + grace)
            return True
        return mark is not None and mark["kind"] != "withdrawn"

    def _blocks(self, task: Task, *, states: set[str], window: int | None) -> bool:
        if task["released"]:
            return False
        if window is not None and task["created_at"] + window <= self.now:
            return False
        counts_as = {self.shown_state(task)}
        if task["state"] == "pending":
            counts_as.add("scheduled" if self.eta_lies_ahead(task) else "available")
        return bool(counts_as & states)

    def _may_be_named(self, blockers: list[Task]) -> list[str]:
        """An active one first, then the newest."""
        if not blockers:
            return []
        return self._newest([t for t in blockers if t["state"] == "active"] or blockers)

    def _newest(self, tasks: list[Task]) -> list[str]:
        newest = max(task["created_at"] for task in tasks)
        return [task["id"] for task in tasks if task["created_at"] == newest]

    def count_duplicate(self, key: str, holder: str) -> None:
        task = self.task(key, holder)
        assert task is not None
        task["duplicates"] += 1
        task["last_duplicate_at"] = self.now

    def confirm(self, key: str, task_id: str, lease: int) -> None:
        task = self.task(key, task_id)
        if task is not None and task["state"] == "pending":
            task["state"] = "available"
            task["lease"] = self._from_eta(task) + lease
            self._finalise(key, task_id, lease)
            self._is_published(key, task_id)

    def _is_published(self, key: str, task_id: str) -> None:
        """A promoted follower is one no more."""
        self.stop_following(key, task_id)
        self.look_after(key)

    def _from_eta(self, task: Task) -> int:
        return max(self.now, task["eta"] or 0)

    def give_back(self, key: str, task_id: str, mark_for: int) -> bool:
        task = self.task(key, task_id)
        if task is None or task["state"] != "pending" or task["copies"]:
            return False
        self._bring_back(task, mark_for)
        self._remove_task(key, task_id)
        self._set_mark(key, task_id, "withdrawn", mark_for)
        self.look_after(key)
        return True

    def help(self, key: str, task_id: str) -> str:
        task, mark = self.task(key, task_id), self.mark(key, task_id)
        if task is None:
            return "published" if mark is not None and mark["kind"] == "done" else "again"
        if task["state"] != "pending":
            return "published"
        if task["released"] or self.in_limbo(task):
            return "again"
        task["copies"] = True
        return "go"

    def cancel(self, key: str, task_id: str, mark_for: int) -> str:
        task = self.task(key, task_id)
        if task is not None:
            runs = task["state"] == "active" and task["delivery_lease"] > self.now
            if runs or task["state"] in FINAL:
                return "active"
            self._bring_back(task, mark_for)
            if self.in_lane(key, task_id) is None:
                self._forget_follower(key, task_id)
        self._remove_task(key, task_id)
        mark = self.mark(key, task_id)
        # There may be two messages of its id: each has to find that it was revoked.
        lasting = bool(task and task["copies"]) or bool(mark and mark["lasting"])
        followed = self.revoke_follower(key, task_id)
        if mark is not None and mark["kind"] == "done" and not followed:
            return "active"  # it has ended
        before = mark["until"] if mark is not None else 0
        self._set_mark(key, task_id, "revoked", max(mark_for, before - self.now), lasting=lasting)
        self.look_after(key)
        return "cancelled"

    def release(self, key: str, task_id: str | None) -> int:
        live = [
            task
            for task in self.tasks_of(key)
            if not task["released"] and task_id in (None, task["id"])
        ]
        for task in live:
            task["released"] = True
            if task["state"] in FINAL and not task["ending"]:
                self._remove_task(key, task["id"])  # nobody is left to finish it
        if live:
            self.look_after(key)
        return len(live)

    # -- acts of the worker -------------------------------------------------

    def start(
        self,
        key: str,
        task_id: str,
        delivery: str,
        *,
        lease: int,
        run_lease: int,
        created_at: int | None,
        window: int | None,
        mark_for: int,
        keep: set[str],
        arguments: str,
    ) -> tuple[str, bool, str, str]:
        """The verdict, whether the record was lost, the mark that decided, and by whom.

        A ``run`` is told its token with ``note_token``.
        """
        mark = self.mark(key, task_id)
        if mark is not None and mark["kind"] != "done":
            return "superseded", False, mark["kind"], mark["by"] or ""
        task = self.task(key, task_id)
        if mark is not None or (task is not None and self._is_over(task)):
            return "done", False, "", ""
        if task is not None and task["delivery"] == delivery:
            return ("done" if task["ending"] else "run"), False, "", ""
        if task is not None and task["delivery"] is not None:
            alive = task["delivery_lease"] is not None and task["delivery_lease"] > self.now
            if alive or not self._must_wait(task):
                task["copies"] = True  # this id has now been seen in two deliveries
            if alive:
                return "wait", False, "", ""
        if task is not None and self._must_wait(task):
            return "wait", False, "", ""
        lost = task is None
        if task is None:
            created_at = self.now if created_at is None else created_at
            task = {
                "key": key,
                "id": task_id,
                "created_at": created_at,
                "window_ends": None if window is None else created_at + window,
                "eta": None,
                "keep": keep,
                "arguments": arguments,
                "duplicates": 0,
                "last_duplicate_at": None,
                "copies": False,
                "released": False,
                "since": None,
            }
            self.tasks.append(task)
        task.update(
            state="active",
            ending=False,
            delivery=delivery,
            delivery_lease=self.now + run_lease,
            # A record that was not there stays only if it is renewed.
            lease=self.now + (run_lease if lost else lease),
            token=None,
            by=None,
            after=None,
        )
        self._finalise(key, task_id, mark_for)  # a start is a confirm
        self._is_published(key, task_id)
        return "run", lost, "", ""

    def _must_wait(self, task: Task) -> bool:
        """In limbo, or its predecessor has not ended."""
        before = self.task(task["key"], task["after"]) if task["after"] else None
        runs = before is not None and before["state"] not in FINAL and not before["released"]
        return self.in_limbo(task) or runs

    def _is_over(self, task: Task) -> bool:
        return task["state"] in FINAL and not task["ending"]

    def note_token(self, key: str, task_id: str, token: int) -> None:
        task = self.task(key, task_id)
        assert task is not None
        task["token"] = token

    def renew_running(
        self, key: str, task_id: str, delivery: str, *, lease: int, run_lease: int, copies: bool
    ) -> bool:
        task = self.task(key, task_id)
        if task is None or task["delivery"] != delivery or self._is_over(task):
            return False
        task["lease"] = max(task["lease"], self.now + lease)
        task["delivery_lease"] = max(task["delivery_lease"] or 0, self.now + run_lease)
        task["copies"] = task["copies"] or copies
        self._lane_waits_longer(key)
        return True

    def _lane_waits_longer(self, key: str) -> None:
        """Nobody needs to look after parked calls while those before them are renewed."""
        if any(one["key"] == key for one in self.lane):
            self.look_after(key)

    def renew_held(
        self, key: str, task_id: str, *, lease: int, copies: bool, waits_as: str
    ) -> bool:
        task, mark = self.task(key, task_id), self.mark(key, task_id)
        if mark is not None:
            mark["until"] = max(mark["until"], self.now + lease)
        started = task is not None and waits_as != "" and task["delivery"] == waits_as
        if task is not None and task["state"] not in FINAL and not started:
            was_pending = task["state"] == "pending"
            task["lease"] = max(task["lease"], self._from_eta(task) + lease)
            task["copies"] = task["copies"] or copies
            if was_pending:
                task["state"] = "available"
                self._finalise(key, task_id, lease)
                self._is_published(key, task_id)
            self._lane_waits_longer(key)
        return task is not None or mark is not None

    def retry(self, key: str, task_id: str, delivery: str, *, lease: int, copies: bool) -> None:
        task = self.task(key, task_id)
        if task is None or task["state"] != "active" or task["delivery"] != delivery:
            return
        task.update(
            state="retryable",
            delivery=None,
            delivery_lease=None,
            lease=self.now + lease,
            copies=task["copies"] or copies,
        )
        self.look_after(key)

    def finish(
        self,
        key: str,
        task_id: str,
        delivery: str,
        *,
        state: str,
        retention: int,
        mark_for: int,
        later: bool,
        run_lease: int,
    ) -> tuple[str, bool, int, bool, list[tuple[str, bool]]]:
        """The verdict, whether settle is asked for, the duplicates absorbed, whether it is
        followed, and who has a turn now."""
        task = self.task(key, task_id)
        if task is None or self._is_over(task) or task["delivery"] not in (None, delivery):
            return "not_yours", False, 0, False, []
        if task["ending"]:  # told twice
            return "ended", True, task["duplicates"], self.is_followed(key, task_id), []
        if task["state"] == "pending":  # the store never heard that it was published
            if state == "cancelled":
                self._bring_back(task, mark_for)
            else:
                self._finalise(key, task_id, mark_for)  # it ran
        followed = self.is_followed(key, task_id)
        self._forget_follower(key, task_id)
        if later or task["copies"] or followed:
            task.update(state=state, ending=True, delivery=delivery)
            if followed:
                alive = max(task["delivery_lease"] or 0, self.now + run_lease)
                task["delivery_lease"] = alive
            if state in task["keep"]:  # a promise that holds if nobody lives to settle it
                until = task["window_ends"]
                until = self.now + retention if until is None else until
                task["lease"] = max(task["lease"], until)
            called = self.call_from_lane(key)
            self.look_after(key)
            return "ended", True, task["duplicates"], followed, called
        self._end(task, state, retention)
        called = self.call_from_lane(key)
        self.look_after(key)
        return "ended", False, task["duplicates"], False, called

    def settle(
        self,
        key: str,
        task_id: str,
        delivery: str,
        *,
        state: str,
        retention: int,
        mark_for: int,
        again: bool,
    ) -> None:
        task = self.task(key, task_id)
        if task is None or not task["ending"] or task["delivery"] != delivery:
            return
        if again or task["copies"]:
            self._set_mark(key, task_id, "done", mark_for)
        self._end(task, state, retention)
        self.look_after(key)

    def _end(self, task: Task, state: str, retention: int) -> None:
        """A final state that the policy names is kept until the window (or retention) ends."""
        until = self.now + retention if task["window_ends"] is None else task["window_ends"]
        if state in task["keep"] and until > self.now:
            task.update(state=state, ending=False, lease=until, delivery_lease=None)
        else:
            self._remove_task(task["key"], task["id"])

    def forget(self, key: str, task_id: str) -> None:
        mark = self.mark(key, task_id)
        follower = self.follower(key, task_id)
        reaped = follower is not None and (follower["promoted"] or follower["holder"] == task_id)
        reaped = reaped or self.in_lane(key, task_id) is not None
        task = self.task(key, task_id)
        twice = task is not None and task["copies"]
        if mark is not None and not (mark["lasting"] or reaped or twice):
            self._remove_mark(key, task_id)

    # -- the two lists ------------------------------------------------------

    def _remove_task(self, key: str, task_id: str) -> None:
        self.tasks = [t for t in self.tasks if (t["key"], t["id"]) != (key, task_id)]

    def _remove_mark(self, key: str, task_id: str) -> None:
        self.marks = [m for m in self.marks if (m["key"], m["id"]) != (key, task_id)]

    def _set_mark(
        self,
        key: str,
        task_id: str,
        kind: str,
        mark_for: int,
        by: str | None = None,
        lasting: bool = False,
    ) -> None:
        self._remove_mark(key, task_id)
        until = self.now + mark_for
        mark = {"key": key, "id": task_id, "kind": kind, "until": until, "by": by}
        self.marks.append({**mark, "lasting": lasting})
