"""Memory stores that each leave one rule of merging out, as in ``broken``."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from celery_unique.stores.acts import merge
from celery_unique.stores.base import Acquired, Claim, Finish, Finished, Start, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.testing.store_contract import LockStoreContract as Contract
from tests.stores.broken import BrokenStore, caught_by


class BrokenMerging(MemoryStore):
    changing = BrokenStore.changing


@caught_by(
    Contract.test_the_body_gets_the_values_of_all_calls_in_the_order_of_their_admission,
    Contract.test_a_failed_publish_takes_no_merged_values_with_it,
)
class SwallowsValues(BrokenMerging):
    """As ``ignore``: the call is a duplicate, and its values are gone."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.outcome == "merged" and claim.merge:
            self.unmerge(key, claim.task_id)
        return reply


@caught_by(Contract.test_the_first_caller_dies_and_a_copy_runs_with_all_values)
class StoresNoOwnValues(BrokenMerging):
    """The values of the first call are only in its message, which a copy replaces."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.outcome == "created" and claim.merge:
            with self.changing(key) as (record, _):
                record.payloads.drop(claim.task_id)
        return reply


@caught_by(
    Contract.test_a_call_succeeds_a_task_that_has_started_and_later_ones_are_merged_into_it,
    state=State.ACTIVE,
)
@caught_by(Contract.test_a_redelivery_gets_the_same_values)
class MergesIntoWhatRuns(BrokenMerging):
    """A redelivery would run with more than the first delivery."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, now):
            running = [i for i, task in record.tasks.items() if task.running and task.merges]
            if claim.merge and running and claim.task_id not in record.tasks:
                return merge.merge(record, claim, running[0], now)
        return super().acquire(key, claim)


@caught_by(Contract.test_a_failed_publish_takes_no_merged_values_with_it)
class GivesBackWhatOthersWaitFor(BrokenMerging):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            if task_id in record.tasks:
                record.tasks[task_id].duplicates = 0
        return super().give_back(key, task_id, mark_ms)


@caught_by(
    Contract.test_a_failed_publish_takes_its_own_values_along_if_a_copy_is_published,
    confirmed=False,
)
class KeepsValuesOfACallThatRaised(BrokenMerging):
    """They would run, and again with the next attempt of their caller."""

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            task = record.tasks.get(task_id)
            if task is not None and task.copies:
                return False
        return super().give_back(key, task_id, mark_ms)


@caught_by(
    Contract.test_a_redelivery_gets_the_same_values,
    Contract.test_a_retry_gets_the_same_values,
)
class DropsValuesAtTheStart(BrokenMerging):
    def start(self, key: str, start: Start) -> Started:
        started = super().start(key, start)
        if started.verdict == "run":
            with self.changing(key) as (record, _):
                record.payloads.drop(start.task_id)
        return started


@caught_by(Contract.test_a_redelivery_before_the_result_is_settled_gets_the_same_values)
class DropsValuesAtTheEnd(BrokenMerging):
    """Before the result is stored."""

    def finish(self, key: str, finish: Finish) -> Finished:
        finished = super().finish(key, finish)
        with self.changing(key) as (record, _):
            record.payloads.drop(finish.task_id)
        return finished


@caught_by(Contract.test_a_message_whose_lock_has_lapsed_runs_with_all_values, later=0)
class DropsValuesWithTheLease(BrokenMerging):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id not in record.tasks:
                record.payloads.drop(start.task_id)
        return super().start(key, start)


@caught_by(Contract.test_a_repeated_attempt_whose_grace_has_passed_keeps_what_was_merged)
class BeginsAnewAfterTheGrace(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, _):
            if claim.again and claim.task_id not in record.tasks:
                record.payloads.drop(claim.task_id)
        return super().acquire(key, claim)


@caught_by(Contract.test_a_repeated_attempt_is_merged_once)
class MergesARepeatedAttemptTwice(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, again=claim.again and not claim.merge))


@caught_by(
    Contract.test_a_payload_that_would_be_too_long_starts_a_successor,
    Contract.test_successors_of_a_full_successor_run_one_after_the_other,
)
class TakesAnyLength(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(key, replace(claim, merge_max_bytes=10**9))


@caught_by(Contract.test_the_body_gets_the_values_of_all_calls_in_the_order_of_their_admission)
class PutsTheNewestFirst(BrokenMerging):
    def start(self, key: str, start: Start) -> Started:
        started = super().start(key, start)
        lines = started.payload.splitlines(keepends=True)
        return replace(started, payload="".join(reversed(lines)))


@caught_by(
    Contract.test_a_call_with_a_delay_postpones_a_scheduled_task,
    Contract.test_a_call_postpones_no_task_beyond_its_longest_wait,
)
class PostponesNothing(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, _):
            waits = any(task.merges and task.eta for task in record.tasks.values())
        return super().acquire(key, replace(claim, delay_ms=0 if waits else claim.delay_ms))


@caught_by(Contract.test_a_call_postpones_no_task_beyond_its_longest_wait)
class PostponesMergedTasksForEver(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        return super().acquire(
            key, replace(claim, max_wait_ms=0 if claim.merge else claim.max_wait_ms)
        )


@caught_by(Contract.test_an_id_that_is_used_again_begins_with_its_own_values)
class KeepsValuesOfAnEarlierTask(BrokenMerging):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, _):
            known = claim.task_id in record.tasks
            earlier = "" if known else record.payloads.text(claim.task_id)
        reply = super().acquire(key, claim)
        if reply.outcome == "created" and claim.merge:
            with self.changing(key) as (record, now):
                for line in earlier.splitlines(keepends=True):
                    record.payloads.append(claim.task_id, line, 0, now)
        return reply


@caught_by(Contract.test_another_task_with_the_same_key_takes_no_values)
class MergesIntoAnotherTask(BrokenMerging):
    """Two tasks may share a key: the one would run with the values of the other."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, _):
            names = {task.task_name for task in record.tasks.values() if task.merges}
        name = names.pop() if claim.merge and len(names) == 1 else claim.task_name
        return super().acquire(key, replace(claim, task_name=name))


@caught_by(Contract.test_a_copy_whose_call_was_not_made_runs_with_the_values_of_the_task)
class LeavesOwnValuesToTheMessage(BrokenMerging):
    """The message may be a copy, with the values of a call that was not made."""

    def start(self, key: str, start: Start) -> Started:
        started = super().start(key, start)
        alone = started.payload.count("\n") == 1
        return replace(started, payload="") if alone else started


@caught_by(Contract.test_a_revoked_task_takes_the_calls_merged_into_it_along)
class KeepsValuesOfARevokedTask(BrokenMerging):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        with self.changing(key) as (record, _):
            text = record.payloads.text(task_id)
        verdict = super().cancel(key, task_id, mark_ms)
        if verdict == "cancelled" and text:
            self._kept = (key, task_id, text)
        return verdict

    def start(self, key: str, start: Start) -> Started:
        started = super().start(key, start)
        *revoked, kept = getattr(self, "_kept", (None, None, ""))
        runs = started.verdict == "run" and revoked == [key, start.task_id]
        return replace(started, payload=kept) if runs else started


@caught_by(
    Contract.test_a_follower_of_a_lost_task_runs_with_all_of_its_values,
    Contract.test_a_follower_of_a_lost_task_succeeds_one_that_has_started,
)
class PromotesWithoutValues(BrokenMerging):
    def reap(self, key: str, reaper: str, claim_ms: int):  # type: ignore[no-untyped-def]
        with self.changing(key) as (record, _):
            for task_id in {group.holder for group in record.following.groups.values()}:
                record.payloads.drop(task_id)
        return super().reap(key, reaper, claim_ms)


@caught_by(Contract.test_the_values_of_a_call_that_is_not_made_are_removed)
class RemovesNothing(BrokenMerging):
    def unmerge(self, key: str, call_id: str) -> bool:
        return False


def every_broken_store() -> list[type[MemoryStore]]:
    return [*BrokenMerging.__subclasses__()]
