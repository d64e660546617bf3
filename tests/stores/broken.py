"""Memory stores that each leave one rule of the protocol out.

They exist to show that the tests can fail: the counterexample of a rule must catch the
store without it, and so must the state machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from celery_unique.stores.base import Acquired, Claim, Finish, Finished, Held, Start, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import LETTER_OF, Mark, Record, State, TaskEntry


class BrokenStore(MemoryStore):
    """Changes a record behind the acts' back, before or after one of them."""

    @contextmanager
    def changing(self, key: str) -> Iterator[tuple[Record, int]]:
        with self._mutex:
            now = self._now_us() // 1000
            record = self._records.setdefault(key, Record())
            record.purge(now)
            yield record, now


class HidesThatTheHolderIsPending(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.holder is None or reply.holder.state is not State.PENDING:
            return reply
        return replace(reply, holder=replace(reply.holder, state=State.AVAILABLE))


class ConfirmsBeforeThePublish(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if reply.outcome == "created":
            self.confirm(key, claim.task_id, 24 * 3_600_000)
        return reply


class ConfirmCreates(BrokenStore):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        super().confirm(key, task_id, lease_ms)
        with self.changing(key) as (record, now):
            created = TaskEntry("w", now, now + lease_ms, "shop.rebuild")
            record.tasks.setdefault(task_id, created)


class RenewCreates(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        replies = super().renew(held)
        for one in held:
            with self.changing(one.key) as (record, now):
                created = TaskEntry("w", now, now + one.lease_ms, "shop.rebuild")
                record.tasks.setdefault(one.task_id, created)
        return replies


class ConfirmActsOnAnyState(BrokenStore):
    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        with self.changing(key) as (record, now):
            if task_id in record.tasks:
                task = record.tasks[task_id]
                task.state, task.delivery, task.lease = "w", "", max(now, task.eta) + lease_ms


class GivesBackInAnyState(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            if task_id in record.tasks:
                record.tasks[task_id].state = "p"
        return super().give_back(key, task_id, mark_ms)


class GiveBackIgnoresCopies(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        with self.changing(key) as (record, _):
            if task_id in record.tasks and record.tasks[task_id].state == "p":
                record.tasks[task_id].unflag("m")
        return super().give_back(key, task_id, mark_ms)


class LeavesNoWithdrawnMark(BrokenStore):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        removed = super().give_back(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            if removed:
                del record.marks[task_id]
        return removed


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


class DropsTasksWhoseLeaseLapsed(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id not in record.tasks and start.task_id not in record.marks:
                return Started("superseded", mark="superseded")
        return super().start(key, start)


class StartsBesideALivingDelivery(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            if start.task_id in record.tasks:
                record.tasks[start.task_id].delivery_lease = 0
        return super().start(key, start)


class HasOneLeaseForLockAndDelivery(BrokenStore):
    def start(self, key: str, start: Start) -> Started:
        return super().start(key, replace(start, run_lease_ms=start.lease_ms))


class FinishDoesNotCompareTheDelivery(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        with self.changing(key) as (record, _):
            if finish.task_id in record.tasks:
                record.tasks[finish.task_id].delivery = finish.delivery
        return super().finish(key, finish)


class FinishEndsEveryTaskOfTheKey(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, _):
            record.tasks.clear()
        return reply


class SettleLeavesNoDoneMark(BrokenStore):
    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        super().settle(key, finish, mark_done)
        with self.changing(key) as (record, _):
            record.marks.pop(finish.task_id, None)


class SettleIsNotToldThatTheMessageMayComeAgain(BrokenStore):
    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        super().settle(key, finish, False)


class MarksDoneAtFinish(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, now):
            if reply.settle:
                record.marks[finish.task_id] = Mark("done", now + finish.mark_ms)
        return reply


class FinishReleasesFullyBeforeTheAcknowledgement(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        return super().finish(key, replace(finish, settle_later=False))


class ShowsTheEndOnlyOnceItIsSettled(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, _):
            if reply.settle and finish.task_id in record.tasks:
                record.tasks[finish.task_id].state = "r"
        return reply


class DropsAMessageThatComesAfterTheRetryAct(BrokenStore):
    """Tells a stale redelivery by counting: a message seen before a retry is dropped."""

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        super().retry(key, task_id, delivery, lease_ms, copies)
        with self.changing(key) as (record, now):
            if task_id in record.tasks and record.tasks[task_id].state == "t":
                record.marks[task_id] = Mark("superseded", now + lease_ms)


class RetryForgetsTheOldMessage(BrokenStore):
    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        super().retry(key, task_id, delivery, lease_ms, copies=False)


class RevokesTasksThatRun(BrokenStore):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        with self.changing(key) as (record, _):
            if task_id in record.tasks:
                record.tasks[task_id].delivery_lease = 0
        return super().cancel(key, task_id, mark_ms)


class RevokeLeavesNoMark(BrokenStore):
    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        verdict = super().cancel(key, task_id, mark_ms)
        with self.changing(key) as (record, _):
            if verdict == "cancelled":
                del record.marks[task_id]
        return verdict


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


class IgnoresTheCallersWindow(BrokenStore):
    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, replace(claim, window_ms=0))
        with self.changing(key) as (record, now):
            if reply.outcome == "created" and claim.window_ms and claim.task_id in record.tasks:
                record.tasks[claim.task_id].window_ends = now + claim.window_ms
        return reply


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


class KeepsEveryEnd(BrokenStore):
    def finish(self, key: str, finish: Finish) -> Finished:
        with self.changing(key) as (record, _):
            if finish.task_id in record.tasks:
                record.tasks[finish.task_id].keep = LETTER_OF[finish.state]
        return super().finish(key, finish)


class RenewShortens(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        replies = super().renew(held)
        for one, mine in zip(held, replies, strict=True):
            with self.changing(one.key) as (record, now):
                if mine and one.delivery:
                    record.tasks[one.task_id].lease = now + one.lease_ms
        return replies


class RenewsAsWaitingWhatHasStarted(BrokenStore):
    def renew(self, held: Sequence[Held]) -> list[bool]:
        return super().renew([replace(one, waits_as="") for one in held])


def every_broken_store() -> list[type[BrokenStore]]:
    return BrokenStore.__subclasses__()
