"""Memory stores that each leave one rule of the protocol out.

They show that the tests can fail: the contract must catch each of them, through the tests that
its decorator names, and so must the state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import pytest

from celery_unique.stores.base import Acquired, Claim, Finish, Finished, Held, Start, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import LETTER_OF, Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract import LockStoreContract as Contract

Broken = TypeVar("Broken", bound=type[MemoryStore])

#: The tests of the contract that each broken store must fail.
CAUGHT_BY: list[Any] = []


def caught_by(*tests: Callable[..., None], **arguments: Any) -> Callable[[Broken], Broken]:
    """Record the tests of the contract that must fail on the store, with these parameters."""

    def record(store: Broken) -> Broken:
        CAUGHT_BY.extend(
            pytest.param(store, partial(test, **arguments), id=f"{test.__name__}-{store.__name__}")
            for test in tests
        )
        return store

    return record


class BrokenStore(MemoryStore):
    """Changes a record behind the acts' back, before or after one of them."""

    @contextmanager
    def changing(self, key: str) -> Iterator[tuple[Record, int]]:
        with self._mutex:
            now = self._now_us() // 1000
            record = self._records.setdefault(key, Record())
            record.purge(now)
            yield record, now


@caught_by(Contract.test_a_duplicate_of_a_pending_holder_can_see_to_it_that_the_holder_is_published)
class HidesThatTheHolderIsPending(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.holder is None or reply.holder.state is not State.PENDING:
            return reply
        return replace(reply, holder=replace(reply.holder, state=State.AVAILABLE))


@caught_by(
    Contract.test_a_publisher_that_died_before_its_publish_blocks_for_the_grace_only,
    Contract.test_a_publish_that_failed_frees_the_key_at_once,
)
class ConfirmsBeforeThePublish(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.outcome == "created":
            self.confirm(key, claim.task_id, 24 * 3_600_000)
        return reply


@caught_by(Contract.test_a_confirm_that_arrives_after_the_end_revives_nothing)
class ConfirmCreates(BrokenStore):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        super().confirm(key, task_id, lease_ms)
        with self.changing(key) as (record, now):
            created = TaskEntry("w", now, now + lease_ms, "shop.rebuild")
            record.tasks.setdefault(task_id, created)


@caught_by(Contract.test_a_renewal_that_arrives_after_the_end_revives_nothing)
class RenewCreates(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        replies = super().renew(held)
        for one in held:
            with self.changing(one.key) as (record, now):
                created = TaskEntry("w", now, now + one.lease_ms, "shop.rebuild")
                record.tasks.setdefault(one.task_id, created)
        return replies


@caught_by(Contract.test_a_confirm_that_arrives_after_the_start_lets_no_twin_in)
class ConfirmActsOnAnyState(BrokenStore):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        with self.changing(key) as (record, now):
            if task_id in record.tasks:
                task = record.tasks[task_id]
                task.state, task.delivery, task.lease = "w", "", max(now, task.eta) + lease_ms


@caught_by(Contract.test_a_publish_that_raised_but_landed_and_started_keeps_its_lock)
class GivesBackInAnyState(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            if task_id in record.tasks:
                record.tasks[task_id].state = "p"
        return super().give_back(key, task_id, mark_ms)


@caught_by(Contract.test_a_copy_survives_the_failed_publish_of_the_first_caller)
class GiveBackIgnoresCopies(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            if task_id in record.tasks and record.tasks[task_id].state == "p":
                record.tasks[task_id].unflag("m")
        return super().give_back(key, task_id, mark_ms)


@caught_by(
    Contract.test_a_publish_that_raised_but_landed_does_not_run_beside_the_next_call,
    Contract.test_a_failed_replacement_that_landed_does_not_run_beside_the_old_task,
)
class LeavesNoWithdrawnMark(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        removed = super().give_back(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            if removed:
                del record.marks[task_id]
        return removed


@caught_by(Contract.test_a_copy_that_is_delivered_after_the_end_does_not_run_again)
class HelpForgetsTheCopy(BrokenStore):
    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        with self.changing(key) as (record, _):
            had_copies = task_id in record.tasks and record.tasks[task_id].copies
        verdict = super().help(key, task_id, claim_ms)
        with self.changing(key) as (record, _):
            if verdict == "go" and not had_copies:
                record.tasks[task_id].unflag("m")
        return verdict


@caught_by(
    Contract.test_a_task_whose_lease_lapsed_in_the_broker_runs,
    Contract.test_a_task_whose_record_was_lost_with_the_store_runs,
)
class DropsTasksWhoseLeaseLapsed(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id not in record.tasks and start.task_id not in record.marks:
                return Started("superseded", mark="superseded")
        return super().start(key, start)


@caught_by(
    Contract.test_the_twin_of_a_visibility_timeout_does_not_run_beside_the_first,
    Contract.test_a_paused_worker_does_not_renew_what_another_delivery_has_taken_over,
    Contract.test_a_retry_that_is_delivered_before_the_retry_act_waits,
)
class StartsBesideALivingDelivery(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id in record.tasks:
                record.tasks[start.task_id].delivery_lease = 0
        return super().start(key, start)


@caught_by(Contract.test_a_redelivery_after_a_crash_runs_as_soon_as_the_short_lease_has_passed)
class HasOneLeaseForLockAndDelivery(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        return super().start(key, replace(start, run_lease_ms=start.lease_ms))


@caught_by(Contract.test_a_paused_old_owner_does_not_end_the_new_owners_lock)
class FinishDoesNotCompareTheDelivery(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        with self.changing(key) as (record, _):
            if finish.task_id in record.tasks:
                record.tasks[finish.task_id].delivery = finish.delivery
        return super().finish(key, finish)


@caught_by(
    Contract.test_a_paused_old_owner_does_not_end_the_next_tasks_lock,
    Contract.test_settling_the_first_task_leaves_the_next_one_alone,
)
class FinishEndsEveryTaskOfTheKey(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, _):
            record.tasks.clear()
        return reply


@caught_by(
    Contract.test_a_twin_that_waited_does_not_run_the_finished_task_again,
    Contract.test_a_twin_that_comes_only_after_the_end_does_not_run_the_finished_task_again,
)
class SettleLeavesNoDoneMark(BrokenStore):
    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        super().settle(key, finish, mark_done)
        with self.changing(key) as (record, _):
            record.marks.pop(finish.task_id, None)


@caught_by(Contract.test_a_twin_that_comes_only_after_the_end_does_not_run_the_finished_task_again)
class SettleIsNotToldThatTheMessageMayComeAgain(BrokenStore):
    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        super().settle(key, finish, False)


@caught_by(Contract.test_a_crash_before_the_result_is_stored_lets_the_redelivery_produce_it)
class MarksDoneAtFinish(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, now):
            if reply.settle:
                record.marks[finish.task_id] = Mark("done", now + finish.mark_ms)
        return reply


@caught_by(
    Contract.test_a_redelivery_between_finish_and_acknowledgement_does_not_run_beside_the_next_task
)
class FinishReleasesFullyBeforeTheAcknowledgement(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        return super().finish(key, replace(finish, settle_later=False))


@caught_by(Contract.test_a_call_that_has_seen_the_result_is_not_swallowed)
class ShowsTheEndOnlyOnceItIsSettled(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, _):
            if reply.settle and finish.task_id in record.tasks:
                record.tasks[finish.task_id].state = "r"
        return reply


@caught_by(Contract.test_the_original_message_runs_when_the_worker_died_before_its_retry_was_sent)
class DropsAMessageThatComesAfterTheRetryAct(BrokenStore):
    """Tells a stale redelivery by counting: a message seen before a retry is dropped."""

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        super().retry(key, task_id, delivery, lease_ms, copies)
        with self.changing(key) as (record, now):
            if task_id in record.tasks and record.tasks[task_id].state == "t":
                record.marks[task_id] = Mark("superseded", now + lease_ms)


@caught_by(Contract.test_the_original_of_a_retried_task_does_not_run_after_the_end)
class RetryForgetsTheOldMessage(BrokenStore):
    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        super().retry(key, task_id, delivery, lease_ms, copies=False)


@caught_by(Contract.test_a_revoke_does_not_free_the_key_of_a_task_that_runs)
class RevokesTasksThatRun(BrokenStore):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        with self.changing(key) as (record, _):
            if task_id in record.tasks:
                record.tasks[task_id].delivery_lease = 0
        return super().cancel(key, task_id, mark_ms)


@caught_by(
    Contract.test_a_revoked_task_does_not_run_when_its_message_is_delivered,
    Contract.test_a_revoked_task_does_not_run_after_its_worker_died,
)
class RevokeLeavesNoMark(BrokenStore):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        verdict = super().cancel(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            if verdict == "cancelled":
                del record.marks[task_id]
        return verdict


@caught_by(Contract.test_tokens_grow_after_the_record_was_deleted)
class CountsTokensInTheRecord(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            last = record.token
        reply = super().start(key, start)
        if reply.token <= last or reply.verdict != "run":
            return reply
        with self.changing(key) as (record, _):
            record.token = record.tasks[start.task_id].token = last + 1
        return replace(reply, token=last + 1)


@caught_by(Contract.test_a_second_delivery_has_a_larger_token_than_the_one_it_takes_over_from)
class GivesTheTokenWithTheTask(BrokenStore):
    """One token for all deliveries of a task, as if it had been given at acquire."""

    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            given = record.tasks[start.task_id].token if start.task_id in record.tasks else 0
        reply = super().start(key, start)
        if reply.verdict != "run" or not given:
            return reply
        with self.changing(key) as (record, _):
            record.token = record.tasks[start.task_id].token = given
        return replace(reply, token=given)


# -- rules of the design rather than of the protocol's list ------------------


@caught_by(Contract.test_a_call_is_admitted_once_its_own_window_has_passed, state=State.ACTIVE)
class IgnoresTheCallersWindow(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, replace(claim, window_ms=0))
        with self.changing(key) as (record, now):
            if reply.outcome == "created" and claim.window_ms and claim.task_id in record.tasks:
                record.tasks[claim.task_id].window_ends = now + claim.window_ms
        return reply


@caught_by(
    Contract.test_a_pending_task_counts_as_the_state_it_is_about_to_enter,
    delay_ms=0,
    state=State.AVAILABLE,
)
class PendingCountsOnlyAsPending(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        with self.changing(key) as (record, _):
            blind = "p" not in claim.states
            hidden = [i for i, task in record.tasks.items() if blind and task.state == "p"]
            pending = {i: record.tasks.pop(i) for i in hidden if i != claim.task_id}
        reply = super().acquire(key, claim)
        with self.changing(key) as (record, _):
            record.tasks.update(pending)
        return reply


@caught_by(Contract.test_finish_touches_only_its_own_task)
class KeepsEveryEnd(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        with self.changing(key) as (record, _):
            if finish.task_id in record.tasks:
                record.tasks[finish.task_id].keep = LETTER_OF[finish.state]
        return super().finish(key, finish)


@caught_by(Contract.test_renew_never_shortens_a_lease)
class RenewShortens(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        replies = super().renew(held)
        for one, mine in zip(held, replies, strict=True):
            with self.changing(one.key) as (record, now):
                if mine and one.delivery:
                    record.tasks[one.task_id].lease = now + one.lease_ms
        return replies


@caught_by(
    Contract.test_a_worker_that_dies_as_its_task_starts_does_not_leave_the_key_to_the_queue_lease
)
class RenewsAsWaitingWhatHasStarted(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        return super().renew([replace(one, waits_as="") for one in held])


def every_broken_store() -> list[type[BrokenStore]]:
    return BrokenStore.__subclasses__()
