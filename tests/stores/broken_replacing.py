"""Memory stores that each leave one rule of replacing or succeeding out, as in ``broken``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_unique.stores.base import Acquired, Claim, Held, Start, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Mark, Record
from celery_unique.testing.store_contract import LockStoreContract as Contract
from tests.stores.broken import BrokenStore, caught_by


class BrokenReplacing(MemoryStore):
    changing = BrokenStore.changing


def _supersede(record: Record, task_ids: Sequence[str], by: str) -> None:
    for task_id in task_ids:
        task = record.tasks.pop(task_id, None)
        if task is not None:
            record.marks[task_id] = Mark("superseded", task.lease, by)


@caught_by(
    Contract.test_the_old_task_is_not_dropped_before_the_new_one_is_published,
    Contract.test_the_old_task_runs_when_the_caller_that_replaces_it_dies,
)
class SupersedesAtTheSwap(BrokenReplacing):
    """No limbo: the old task is over before the new one is published."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        with self.changing(key) as (record, _):
            _supersede(record, reply.replaced, claim.task_id)
        return reply


@caught_by(Contract.test_a_failed_replacement_brings_the_old_task_back)
class BringsNothingBack(BrokenReplacing):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            replaced = [i for i, task in record.tasks.items() if task.by == task_id]
        removed = super().give_back(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            _supersede(record, replaced if removed else (), task_id)
        return removed


@caught_by(Contract.test_the_old_message_does_not_run_once_the_new_one_is_published)
class LeavesNoSupersededMark(BrokenReplacing):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        super().confirm(key, task_id, lease_ms)
        with self.changing(key) as (record, _):
            superseded = [i for i, mark in record.marks.items() if mark.kind == "superseded"]
            for each in superseded:
                del record.marks[each]


@caught_by(Contract.test_each_message_of_a_helped_task_finds_that_it_was_superseded)
class ForgetsTheMarkOfCopies(BrokenReplacing):
    """The first of two messages that is dropped takes the mark along."""

    def forget(self, key: str, task_id: str) -> None:
        with self.changing(key) as (record, _):
            record.marks.pop(task_id, None)


@caught_by(Contract.test_giving_back_a_replacement_in_the_middle_frees_nothing)
class FreesWhatAMiddleReplacementReplaced(BrokenReplacing):
    """No chain: giving back the middle one makes the first live beside the last."""

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            replaced = [i for i, task in record.tasks.items() if task.by == task_id]
        removed = super().give_back(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            for each in replaced if removed else ():
                record.tasks[each].by = ""
        return removed


@caught_by(Contract.test_the_old_task_does_not_start_while_the_new_one_is_being_published)
class LetsATaskInLimboStart(BrokenReplacing):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id in record.tasks:
                record.tasks[start.task_id].by = ""
        return super().start(key, start)


@caught_by(
    Contract.test_a_replacement_that_started_before_its_confirm_came_has_ended_the_old_task,
    Contract.test_a_replacement_in_a_workers_hand_has_ended_the_old_task,
)
class OnlyAConfirmPublishes(BrokenReplacing):
    """A start, and a message in a worker's hand, leave what they replaced in limbo."""

    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            replaced = {i: task.by for i, task in record.tasks.items() if task.by == start.task_id}
            for each in replaced:
                record.tasks[each].by = ""
        reply = super().start(key, start)
        with self.changing(key) as (record, _):
            for each, by in replaced.items():
                record.tasks[each].by = by
        return reply

    def renew(self, held: Sequence[Held]) -> list[bool]:
        return super().renew([one for one in held if one.delivery]) + [
            True for one in held if not one.delivery
        ]


@caught_by(Contract.test_a_task_that_runs_is_not_replaced)
class ReplacesTasksThatRun(BrokenReplacing):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.outcome != "rejected" or not claim.on_conflict.startswith("replace"):
            return reply
        return super().acquire(key, replace(claim, states=claim.states.replace("r", "")))


@caught_by(Contract.test_a_successor_does_not_overlap_its_holder)
class SuccessorsDoNotWait(BrokenReplacing):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        with self.changing(key) as (record, _):
            if reply.after:
                record.tasks[claim.task_id].after = ""
        return reply


@caught_by(Contract.test_there_is_one_successor_and_it_is_the_newest)
class KeepsOlderSuccessors(BrokenReplacing):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        with self.changing(key) as (record, _):
            for task in record.tasks.values():
                if reply.after and task.by == claim.task_id:
                    task.by = ""
        return reply


@caught_by(Contract.test_a_task_that_schedules_itself_is_not_swallowed_by_itself)
class ATaskIsItsOwnDuplicate(BrokenReplacing):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, parent=""))


@caught_by(Contract.test_a_steady_stream_of_calls_does_not_push_a_task_back_for_ever)
class PushesBackForEver(BrokenReplacing):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, max_wait_ms=0))


def every_broken_store() -> list[type[BrokenReplacing]]:
    return BrokenReplacing.__subclasses__()
