"""The part of the model that is about lanes, from the same sentences and as plainly.

A call that is parked, or was called and is not confirmed, is a dictionary in one list, which is in
the order of admission.
"""

from __future__ import annotations

from typing import Any

Task = dict[str, Any]
Call = dict[str, Any]

PARKED_KEPT = 30 * 24 * 60
LOOK = 1


class LanesModel:
    now: int
    tasks: list[Task]

    def __init__(self) -> None:
        self.lane: list[Call] = []

    # -- from the rest of the model -------------------------------------------

    def task(self, key: str, task_id: str) -> Task | None:
        raise NotImplementedError

    def blockers(self, key: str, *, states: set[str], window: int | None) -> list[Task]:
        raise NotImplementedError

    # -- who is there -----------------------------------------------------------

    def in_lane(self, key: str, task_id: str) -> Call | None:
        found = [one for one in self.lane if (one["key"], one["id"]) == (key, task_id)]
        return found[0] if found else None

    def parked(self, key: str) -> list[str]:
        return [one["id"] for one in self.lane if one["key"] == key and not one["called"]]

    def called(self, key: str) -> list[str]:
        return [one["id"] for one in self.lane if one["key"] == key and one["called"]]

    def lane_waits(self, key: str) -> bool:
        """A new call must not overtake those that are parked, or are to be called again."""
        lapsed = [task_id for task_id in self.called(key) if self.task(key, task_id) is None]
        return bool(self.parked(key) or lapsed)

    def leave_lane(self, key: str, task_id: str) -> None:
        self.lane = [one for one in self.lane if (one["key"], one["id"]) != (key, task_id)]

    # -- whose turn it is -------------------------------------------------------

    def next_in_lane(self, key: str) -> Call | None:
        """One that was called and not confirmed in time comes first, then the oldest."""
        lapsed = [i for i in self.called(key) if self.task(key, i) is None]
        first = [*lapsed, *self.parked(key)][:1]
        return self.in_lane(key, first[0]) if first else None

    def free_at(self, call: Call) -> int:
        """When fewer tasks than its limit block it, if nothing happens until then."""
        ends = sorted(
            min(task["lease"], task["created_at"] + call["window"])
            if call["window"] is not None
            else task["lease"]
            for task in self.blockers(call["key"], states=call["states"], window=call["window"])
        )
        while len(ends) >= call["limit"]:
            at = ends.pop(0)
            if len(ends) < call["limit"]:
                return int(at)
        return self.now

    def call_at(self, key: str) -> int | None:
        """When somebody should look after the lane."""
        tasks = [self.task(key, task_id) for task_id in self.called(key)]
        times = [task["lease"] for task in tasks if task is not None]
        following = self.next_in_lane(key)
        if following is not None:
            times += [self.free_at(following), *self._looks_at(following)]
        return min(times, default=None)

    def _looks_at(self, call: Call) -> list[int]:
        """A message may be lost: looked for after a minute, and again after twice the wait."""
        found = self.blockers(call["key"], states=call["states"], window=call["window"])
        waiting = [task for task in found if task["state"] in ("available", "retryable")]
        # A task of a message without a record may have been created before the first minute.
        since = [max(at for at in (t["created_at"], t["eta"]) if at is not None) for t in waiting]
        return [max(self.now, at) + max(LOOK, self.now - at) for at in since]

    def call_from_lane(self, key: str) -> list[tuple[str, bool]]:
        """Those that have their turn, and whether they had it before."""
        had_turn = []
        while True:
            call = self.next_in_lane(key)
            if call is None or self.free_at(call) > self.now:
                return had_turn
            had_turn.append((call["id"], call["called"]))
            self._has_its_turn(call)

    def _has_its_turn(self, call: Call) -> None:
        kept = call["kept_for"]
        eta = call["eta"]
        self.tasks.append(
            {
                "key": call["key"],
                "id": call["id"],
                "state": "pending",
                "created_at": self.now,
                "lease": self.now + call["grace"],
                "window_ends": None if kept is None else self.now + kept,
                "eta": eta if eta is not None and eta > self.now else None,
                "keep": call["keep"],
                "arguments": call["arguments"],
                "duplicates": 0,
                "last_duplicate_at": None,
                "delivery": None,
                "delivery_lease": None,
                "token": None,
                "copies": call["copies"] or call["called"],
                "ending": False,
                "released": False,
                "by": None,
                "after": None,
                "since": None,
            }
        )
        call["called"] = True
