"""Memory stores that each leave one rule of lanes out, as in ``broken``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

from celery_unique.stores.acts import lanes
from celery_unique.stores.base import Acquired, Called, Claim, Finish, Finished, Orphan
from celery_unique.stores.memory import MemoryStore, Reply
from celery_unique.stores.record import Record
from celery_unique.stores.record_followers import Parked
from celery_unique.testing.store_contract import LockStoreContract as Contract
from tests.stores.broken import caught_by


class BrokenLanes(MemoryStore):
    """Runs its acts with another function in place of one of theirs."""

    name: ClassVar[str] = ""

    def instead(self, *args: Any) -> Any:
        raise NotImplementedError

    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        if not self.name:
            return super()._act(key, act)
        with patch.object(lanes, self.name, self.instead):
            return super()._act(key, act)


_next = lanes._next
_free_at = lanes._free_at
_become_task = lanes._become_task
_leave = lanes.leave
_call = lanes.call
_beyond_limit = lanes.beyond_limit


@caught_by(
    Contract.test_a_new_call_does_not_overtake_those_that_are_parked,
    Contract.test_a_call_that_is_to_be_called_again_is_not_overtaken,
)
class OvertakesParkedCalls(BrokenLanes):
    name = "waits"

    def instead(self, record: Record) -> bool:
        return False


@caught_by(Contract.test_the_end_of_a_task_calls_the_oldest)
class CallsTheNewest(BrokenLanes):
    name = "_next"

    def instead(self, record: Record) -> tuple[str, Parked] | None:
        found: tuple[str, Parked] | None = _next(record)
        lane = record.following.lane if record.following is not None else None
        if found is None or lane is None or found[0] in lane.called:
            return found
        waiting = [
            (joined.parked.number, task_id, joined.parked)
            for task_id, joined in record.followers.items()
            if joined.parked is not None and task_id not in lane.called
        ]
        return max(waiting)[1:]


@caught_by(Contract.test_a_call_that_has_its_turn_blocks_the_others)
class CallsWithoutRoom(BrokenLanes):
    name = "_free_at"

    def instead(self, record: Record, parked: Parked, now: int) -> int:
        return now


@caught_by(
    Contract.test_a_limit_admits_as_many_tasks, Contract.test_every_place_that_lapses_is_filled
)
class HasALimitOfOne(BrokenLanes):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, limit=1))


@caught_by(Contract.test_the_end_of_a_task_calls_the_oldest)
class LeavesAllToTheReaper(BrokenLanes):
    def finish(self, key: str, finish: Finish) -> Finished:
        with patch.object(lanes, "call", lambda record, now: ()):
            return super().finish(key, finish)


@caught_by(Contract.test_a_call_whose_publish_is_not_confirmed_is_called_again)
class ForgetsTheMessageOnceCalled(BrokenLanes):
    """The worker that publishes it may die before."""

    name = "call"

    def instead(self, record: Record, now: int) -> tuple[Called, ...]:
        called: tuple[Called, ...] = _call(record, now)
        for one in called:
            joined = record.followers.pop(one.task_id)
            assert joined.parked is not None
            _leave(record, one.task_id, joined.parked)
        return called


@caught_by(Contract.test_a_call_whose_publish_is_not_confirmed_is_called_again)
class ForgetsThatThereMayBeTwoMessages(BrokenLanes):
    name = "_become_task"

    def instead(self, record: Record, task_id: str, *args: Any) -> Called:
        called: Called = _become_task(record, task_id, *args)
        record.tasks[task_id].unflag("m")
        return called


@caught_by(Contract.test_a_lease_that_lapses_calls_the_next)
class IsNeverDue(BrokenLanes):
    """Only the end of a task calls the next one: a dead holder keeps all others waiting."""

    name = "due_at"

    def instead(self, record: Record, now: int) -> int | None:
        lane = record.following.lane if record.following is not None else None
        return now + 10**12 if lane is not None else None


@caught_by(Contract.test_a_message_that_is_confirmed_is_not_stored_any_longer)
class CallsAgainWhatWasPublished(BrokenLanes):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        with patch("celery_unique.stores.acts.confirm.stop_following", lambda *_: None):
            super().confirm(key, task_id, lease_ms)


@caught_by(Contract.test_a_lane_holds_no_more_than_max_queue)
class HasNoBound(BrokenLanes):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, max_queue=0))


@caught_by(Contract.test_a_parked_call_that_is_revoked_has_left_the_lane)
class DropsARevokedCall(BrokenLanes):
    """A canvas waits for it for ever."""

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Any:
        reply = super().cancel(key, task_id, mark_ms)
        self.complete_follower(key, task_id)
        return reply


@caught_by(Contract.test_a_parked_call_that_is_revoked_has_left_the_lane)
class KeepsARevokedCallInItsLane(BrokenLanes):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Any:
        if task_id in self.parked(key):
            return "cancelled"
        return super().cancel(key, task_id, mark_ms)


@caught_by(Contract.test_a_call_that_is_parked_already_keeps_its_place)
class ParksOneIdTwice(BrokenLanes):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        if claim.on_conflict == "queue" and claim.task_id in self.parked(key):
            self.complete_follower(key, claim.task_id)
        return super().acquire(key, claim)


@caught_by(Contract.test_a_call_that_is_to_be_called_again_is_not_overtaken)
class CallsTheNextBeforeTheOneToBeCalledAgain(BrokenLanes):
    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        orphans = super().reap(key, reaper, claim_ms)
        return [one for one in orphans if not (one.fate == "called" and one.promoted)]


@caught_by(Contract.test_a_replacement_replaces_only_the_oldest)
class ReplacesAllWithinALimit(BrokenLanes):
    name = "beyond_limit"

    def instead(self, record: Record, claim: Claim, *found: Any) -> Any:
        if claim.on_conflict == "replace":
            return found if len(found[0]) >= claim.limit else ([], [], [])
        return _beyond_limit(record, claim, *found)


def every_broken_store() -> list[type[BrokenLanes]]:
    return BrokenLanes.__subclasses__()
