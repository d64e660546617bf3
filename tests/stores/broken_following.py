"""Memory stores that each leave one rule of followers out, as in ``broken``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from celery_unique.stores import acts
from celery_unique.stores.acts.followers import attach
from celery_unique.stores.base import (
    Acquired,
    Claim,
    Finish,
    Finished,
    Orphan,
    Promotion,
    Start,
    Started,
)
from celery_unique.stores.memory import MemoryStore, Reply
from celery_unique.stores.record import Record
from celery_unique.stores.record_followers import Follower
from celery_unique.testing.store_contract import LockStoreContract as Contract
from tests.stores.broken import BrokenStore, caught_by


class BrokenFollowing(MemoryStore):
    """Changes a record behind the acts' back, before or after one of them."""

    @contextmanager
    def changing(self, key: str) -> Iterator[tuple[Record, int]]:
        with BrokenStore.changing(self, key) as (record, now):  # type: ignore[arg-type]
            yield record, now
            self._due.pop(key, None)
            if record.following is not None:
                self._due[key] = record.following.due_at

    def due_of(self, key: str) -> int | None:
        return self._due.get(key)

    def put_off(self, key: str, due: int | None) -> None:
        """Nobody was told that the followers are due earlier."""
        with self.changing(key) as (record, _):
            if record.following is not None and due is not None:
                record.following.due_at = due


def _forget_all(record: Record) -> None:
    record.following = None
    record.followers.clear()


@caught_by(Contract.test_followers_survive_a_worker_that_dies_before_it_completed_them)
class DropsFollowersAtFinish(BrokenFollowing):
    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        with self.changing(key) as (record, _):
            if reply.followers:
                _forget_all(record)
        return reply


@caught_by(Contract.test_followers_survive_a_worker_that_dies_while_it_completes_them)
class ForgetsWhomItTellsOf(BrokenFollowing):
    """Followers are removed when they are handed to the one that will complete them."""

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        told = super().followers(key, holder_id)
        for follower_id, _ in told:
            self.complete_follower(key, follower_id)
        return told

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        orphans = super().reap(key, reaper, claim_ms)
        for orphan in orphans:
            self.complete_follower(key, orphan.follower_id)
        return orphans


@caught_by(Contract.test_nobody_else_completes_followers_while_the_worker_lives_that_does)
class EndsAFollowedTaskAtOnce(BrokenFollowing):
    """Its followers seem to be nobody's while the worker that ended it completes them."""

    def finish(self, key: str, finish: Finish) -> Finished:
        reply = super().finish(key, finish)
        if reply.followers:
            self.settle(key, finish, mark_done=False)
        return reply


@caught_by(
    Contract.test_followers_survive_a_worker_that_dies_before_it_completed_them,
    Contract.test_followers_of_a_worker_that_died_are_found_within_the_run_lease,
)
class NobodyIsEverDue(BrokenFollowing):
    """No reaper."""

    def due(self, limit: int = 20) -> list[str]:
        return []


@caught_by(Contract.test_followers_of_a_worker_that_died_are_found_within_the_run_lease)
class IsDueWhenTheFirstLeaseWasToEnd(BrokenFollowing):
    """A start that shortens the lease leaves the old time."""

    def start(self, key: str, start: Start) -> Started:
        due = self.due_of(key)
        reply = super().start(key, start)
        self.put_off(key, due)
        return reply


@caught_by(
    Contract.test_a_follower_that_joined_at_the_last_moment_is_found,
    Contract.test_followers_of_a_call_that_could_not_publish_are_found_at_once,
)
class LeavesFollowersOfWhatIsGoneForLater(BrokenFollowing):
    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        due = self.due_of(key)
        reply = super().give_back(key, task_id, mark_ms)
        self.put_off(key, due)
        return reply

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        due = self.due_of(key)
        super().settle(key, finish, mark_done)
        self.put_off(key, due)


@caught_by(Contract.test_followers_of_a_worker_that_died_are_found_within_the_run_lease)
class FollowersLapseWithTheTasks(BrokenFollowing):
    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        with self.changing(key) as (record, _):
            if not record.tasks:
                _forget_all(record)
        return super().reap(key, reaper, claim_ms)


@caught_by(Contract.test_a_look_that_comes_too_early_takes_nobody)
class ReapsFollowersOfTheLiving(BrokenFollowing):
    """Takes everybody whose time has come for an orphan, without looking at the holder."""

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        if super().reap(key, reaper, claim_ms):
            return super().reap(key, reaper, claim_ms)
        return [Orphan(i, one.holder, one.message) for i, one in self.followers(key)]


@caught_by(Contract.test_two_reapers_do_not_complete_the_same_followers)
class ManyReapersAtOnce(BrokenFollowing):
    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        with self.changing(key) as (record, _):
            if record.following is not None:
                record.following.reaper_until = 0
        return super().reap(key, reaper, claim_ms)


@caught_by(Contract.test_a_reaper_that_dies_before_it_published_loses_nobody)
class ForgetsTheMessageAtPromotion(BrokenFollowing):
    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        reply = super().promote(key, follower_id, reaper, grace_ms, mark_ms)
        if reply == "publish":
            self.complete_follower(key, follower_id)
        return reply


@caught_by(Contract.test_a_follower_that_two_reapers_published_runs_once)
class PromotesWithoutCopies(BrokenFollowing):
    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        reply = super().promote(key, follower_id, reaper, grace_ms, mark_ms)
        with self.changing(key) as (record, _):
            if reply == "publish":
                record.tasks[follower_id].unflag("m")
        return reply


@caught_by(
    Contract.test_a_follower_is_not_run_beside_a_new_holder,
    Contract.test_a_second_promotion_looks_for_a_live_task_again,
)
class PromotesBesideALiveTask(BrokenFollowing):
    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        with self.changing(key) as (record, _):
            holders = {one.holder for _, one in _told(record)}
            others = {i: t for i, t in record.tasks.items() if i not in {*holders, follower_id}}
            for task_id in others:
                del record.tasks[task_id]
        reply = super().promote(key, follower_id, reaper, grace_ms, mark_ms)
        with self.changing(key) as (record, _):
            record.tasks.update(others)
        return reply


def _told(record: Record) -> list[tuple[str, Follower]]:
    following = record.following
    if following is None:
        return []
    return [
        (i, Follower(following.holder_of(i, joined), joined.message))
        for i, joined in record.followers.items()
    ]


@caught_by(Contract.test_a_follower_that_waits_again_does_not_run_too)
class WaitsAgainWithoutADoneMark(BrokenFollowing):
    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        with self.changing(key) as (record, _):
            had_mark = follower_id in record.marks
        reply = super().promote(key, follower_id, reaper, grace_ms, mark_ms)
        with self.changing(key) as (record, _):
            if reply == "follows" and not had_mark:
                record.marks.pop(follower_id, None)
        return reply


@caught_by(
    Contract.test_a_follower_that_waited_again_runs_when_it_is_promoted_again,
    Contract.test_a_follower_whose_own_publish_failed_before_runs_when_it_is_promoted,
)
class PromotionLeavesTheMark(BrokenFollowing):
    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        with self.changing(key) as (record, _):
            mark = record.marks.get(follower_id)
        reply = super().promote(key, follower_id, reaper, grace_ms, mark_ms)
        with self.changing(key) as (record, _):
            if reply == "publish" and mark is not None:
                record.marks[follower_id] = mark
        return reply


@caught_by(Contract.test_followers_of_a_superseded_task_are_not_lost)
class FollowersOfTheReplacedAreForgotten(BrokenFollowing):
    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        with self.changing(key) as (record, _):
            before = {i: one.holder for i, one in _told(record)}
        reply = super()._act(key, act)
        with self.changing(key) as (record, _):
            over = {i for i, mark in record.marks.items() if mark.kind == "superseded"}
        for follower_id, holder in before.items():
            if holder in over:
                super()._act(key, partial(_complete, follower_id))
        return reply


def _complete(follower_id: str, record: Record, now_us: int) -> None:
    acts.complete_follower(record, follower_id, now_us // 1000)


@caught_by(Contract.test_a_follower_that_runs_is_not_completed_too)
class AFollowerThatRunsIsStillCompleted(BrokenFollowing):
    def start(self, key: str, start: Start) -> Started:
        with self.changing(key) as (record, _):
            joined = record.followers.get(start.task_id)
            waits = joined is not None and joined.group != ""
            holder = dict(_told(record))[start.task_id].holder if waits else ""
        reply = super().start(key, start)
        if joined is not None and waits and reply.verdict == "run":
            again = Claim(start.task_id, joined.task_name, "", 0, join=joined.message)
            self._act(key, lambda record, us: attach(record, again, holder, us // 1000))
        return reply


@caught_by(Contract.test_nobody_gets_the_result_of_other_work)
class FollowsOtherWork(BrokenFollowing):
    """Behind an idempotency key, whatever the arguments are."""

    def acquire(self, key: str, claim: Claim) -> Acquired:
        reply = super().acquire(key, claim)
        if claim.join and reply.outcome == "duplicate" and reply.holder is not None:
            holder = reply.holder.task_id
            if holder != claim.task_id:
                self._act(key, lambda record, us: attach(record, claim, holder, us // 1000))
        return reply


def every_broken_store() -> list[type[BrokenFollowing]]:
    return BrokenFollowing.__subclasses__()
