"""The part of the model that is about followers, from the same sentences and as plainly.

A follower is a dictionary that names its holder: a store may keep them in any other way.
Whom an orphan comes to follow is the store's choice where several tasks fit, and is told
with ``follow``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Task = dict[str, Any]
Mark = dict[str, Any]
Follower = dict[str, Any]

FINAL = ("completed", "discarded", "cancelled")
KEPT = 3 * 24 * 60


@dataclass
class Promotion:
    """What ``promote`` may answer."""

    verdict: str
    may_be_followed: list[str] = field(default_factory=list)


class FollowingModel:
    now: int
    tasks: list[Task]

    def __init__(self) -> None:
        self.followers: list[Follower] = []
        self.due: dict[str, int] = {}  # when somebody should look after the followers of a key
        self.claims: dict[str, tuple[str, int]] = {}  # who does so, and until when

    # -- from the rest of the model -------------------------------------------

    def tasks_of(self, key: str) -> list[Task]:
        raise NotImplementedError

    def task(self, key: str, task_id: str) -> Task | None:
        raise NotImplementedError

    def mark(self, key: str, task_id: str) -> Mark | None:
        raise NotImplementedError

    def in_limbo(self, task: Task) -> bool:
        raise NotImplementedError

    def in_lane(self, key: str, task_id: str) -> Follower | None:
        raise NotImplementedError

    def leave_lane(self, key: str, task_id: str) -> None:
        raise NotImplementedError

    def call_at(self, key: str) -> int | None:
        raise NotImplementedError

    def call_from_lane(self, key: str) -> list[tuple[str, bool]]:
        raise NotImplementedError

    def _remove_task(self, key: str, task_id: str) -> None:
        raise NotImplementedError

    def _remove_mark(self, key: str, task_id: str) -> None:
        raise NotImplementedError

    def _set_mark(self, key: str, task_id: str, kind: str, mark_for: int) -> None:
        raise NotImplementedError

    # -- who is there -----------------------------------------------------------

    def followers_of(self, key: str) -> list[Follower]:
        return [one for one in self.followers if one["key"] == key]

    def follower(self, key: str, follower_id: str) -> Follower | None:
        found = [one for one in self.followers_of(key) if one["id"] == follower_id]
        return found[0] if found else None

    def is_followed(self, key: str, task_id: str) -> bool:
        return any(one["holder"] == task_id for one in self.followers_of(key) if self._waits(one))

    def _waits(self, follower: Follower) -> bool:
        return not follower["promoted"]

    # -- joining ----------------------------------------------------------------

    def already_joined(self, key: str, follower_id: str) -> str | None:
        """Whom it follows, if that one is there: asking again changes nothing."""
        follower = self.follower(key, follower_id)
        if follower is None or self._is_lost(key, follower["holder"]):
            return None
        holder: str = follower["holder"]
        return holder

    def outcome_of_joining(self, key: str, task_id: str, arguments: str, holder_id: str) -> str:
        holder = self.task(key, holder_id)
        assert holder is not None
        if holder_id == task_id or holder["arguments"] != arguments:
            return "duplicate"
        return "ended" if holder["state"] in FINAL and not holder["ending"] else "joined"

    def join(self, key: str, task_id: str, holder: str, **facts: Any) -> None:
        self._forget_follower(key, task_id)
        self.followers.append(
            {
                "key": key,
                "id": task_id,
                "holder": holder,
                "promoted": False,
                "joined_at": self.now,
                **facts,
            }
        )
        self.look_after(key)

    def stop_following(self, key: str, task_id: str) -> bool:
        if self.follower(key, task_id) is None and self.in_lane(key, task_id) is None:
            return False
        self._forget_follower(key, task_id)
        self.look_after(key)
        return True

    def _forget_follower(self, key: str, task_id: str) -> None:
        self.leave_lane(key, task_id)
        self.followers = [f for f in self.followers if (f["key"], f["id"]) != (key, task_id)]

    def follow_instead(self, key: str, holder: str, other: str) -> None:
        for one in self.followers_of(key):
            if one["holder"] == holder and self._waits(one):
                one["holder"] = other

    def revoke_follower(self, key: str, follower_id: str) -> bool:
        """It waits for nobody any more; somebody has to tell it so."""
        parked = self.in_lane(key, follower_id)
        if parked is not None:  # it has left the lane, and a canvas may wait for its id
            self.leave_lane(key, follower_id)
            facts = {name: parked[name] for name in ("joined_at", "keep", "kept_for", "arguments")}
            self.followers.append(
                {"key": key, "id": follower_id, "holder": "", "promoted": False, **facts}
            )
        follower = self.follower(key, follower_id)
        if follower is None:
            return False
        follower.update(holder=follower_id, promoted=False)
        return True

    # -- losing the holder ------------------------------------------------------

    def there_until(self, key: str, task_id: str) -> int:
        """Until when a task is sure to be there for its followers."""
        task = self.task(key, task_id)
        if task is None:
            return self.now
        runs = task["delivery_lease"] if task["delivery"] is not None else None
        if task["ending"] or (task["released"] and task["state"] not in FINAL):
            return max(self.now, min(task["lease"], runs or 0))
        return self.now if task["state"] in FINAL else int(task["lease"])

    def _is_lost(self, key: str, task_id: str) -> bool:
        return self.there_until(key, task_id) <= self.now

    def is_orphan(self, follower: Follower) -> bool:
        return self._is_lost(follower["key"], follower["holder"])

    def look_after(self, key: str) -> None:
        followers, call_at = self.followers_of(key), self.call_at(key)
        if not followers:
            self.due.pop(key, None)
            self.claims.pop(key, None)
            if call_at is not None:
                self.due[key] = call_at
            return
        first = min(self.there_until(key, one["holder"]) for one in followers)
        _, until = self.claims.get(key, ("", 0))
        at_work = first <= self.now or any(one["promoted"] for one in followers)
        if until > self.now and at_work:
            self.due[key] = max(first, until)
        else:
            self.due[key] = first
            self.claims.pop(key, None)
        if call_at is not None:
            self.due[key] = min(self.due[key], call_at)

    def forget_followers_nobody_looked_after(self) -> None:
        for key, due in list(self.due.items()):
            if due + KEPT <= self.now:
                self.followers = [one for one in self.followers if one["key"] != key]
                self.look_after(key)

    def keys_due(self) -> set[str]:
        return {key for key, at in self.due.items() if at <= self.now}

    def reap(self, key: str, reaper: str, claim_for: int) -> dict[str, tuple[str, bool, str]]:
        """Of every orphan: its holder, whether it is promoted, the holder's fate. And of every
        parked call that has its turn: itself, whether it had it before, and that."""
        called = {i: (i, again, "called") for i, again in self.call_from_lane(key)}
        if called:
            self.look_after(key)
        if self._is_anothers(key, reaper):
            return called
        orphans = [one for one in self.followers_of(key) if self._is_lost(key, one["holder"])]
        if orphans:
            self.claims[key] = (reaper, self.now + claim_for)
        self.look_after(key)
        return called | {
            one["id"]: (one["holder"], one["promoted"], self._fate(key, one["holder"]))
            for one in orphans
        }

    def _is_anothers(self, key: str, reaper: str) -> bool:
        name, until = self.claims.get(key, ("", 0))
        return until > self.now and name != reaper

    def _fate(self, key: str, holder: str) -> str:
        task, mark = self.task(key, holder), self.mark(key, holder)
        if mark is not None:
            kind: str = mark["kind"]
            return kind
        return "done" if task is not None and task["state"] in FINAL else ""

    def promote(self, key: str, follower_id: str, reaper: str, grace: int) -> Promotion:
        follower = self.follower(key, follower_id)
        if follower is None or self._is_anothers(key, reaper):
            return Promotion("gone")
        holder = follower["holder"]
        if not self._is_lost(key, holder):
            if not follower["promoted"]:
                return Promotion("follows", [holder])
            name, until = self.claims.get(key, ("", 0))
            return Promotion("publish" if name == reaper and until > self.now else "gone")
        others = self._may_be_followed(key, {follower_id, holder}, follower["arguments"])
        if others:
            return Promotion("follows", others)
        self._become_task(follower, grace)
        return Promotion("publish")

    def follow(self, key: str, follower_id: str, other: str, mark_for: int) -> None:
        """The store has chosen whom an orphan, and all of its holder, come to follow."""
        follower = self.follower(key, follower_id)
        assert follower is not None
        if follower["holder"] == other:
            return
        self.follow_instead(key, follower["holder"], other)
        if follower["promoted"]:
            self._remove_task(key, follower_id)
            self._set_mark(key, follower_id, "done", mark_for)
            follower.update(holder=other, promoted=False)
        self.look_after(key)

    def _may_be_followed(self, key: str, but: set[str], arguments: str) -> list[str]:
        """Who runs, else who waits, else who has ended well or badly; the newest."""
        fit = [
            task
            for task in self.tasks_of(key)
            if task["id"] not in but
            and task["arguments"] == arguments
            and not task["released"]
            and not self.in_limbo(task)
        ]
        runs = [task for task in fit if task["state"] == "active"]
        waits = [task for task in fit if task["state"] in ("pending", "available", "retryable")]
        ended = [
            task
            for task in fit
            if task["state"] in ("completed", "discarded")
            and (not task["ending"] or (task["delivery_lease"] or 0) > self.now)
        ]
        best = runs or waits or ended
        newest = max((task["created_at"] for task in best), default=None)
        return [task["id"] for task in best if task["created_at"] == newest]

    def _become_task(self, follower: Follower, grace: int) -> None:
        key, task_id = follower["key"], follower["id"]
        self._remove_mark(key, task_id)
        self._remove_task(key, task_id)
        kept = follower["kept_for"]
        self.tasks.append(
            {
                "key": key,
                "id": task_id,
                "state": "pending",
                "created_at": self.now,
                "lease": self.now + grace,
                "window_ends": None if kept is None else self.now + kept,
                "eta": None,
                "keep": follower["keep"],
                "arguments": follower["arguments"],
                "duplicates": 0,
                "last_duplicate_at": None,
                "delivery": None,
                "delivery_lease": None,
                "token": None,
                "copies": True,
                "ending": False,
                "released": False,
                "by": None,
                "after": None,
                "since": None,
            }
        )
        self.follow_instead(key, follower["holder"], task_id)
        follower.update(holder=task_id, promoted=True)
        self.look_after(key)
