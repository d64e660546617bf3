"""Base class of stores that run the acts in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord

from . import acts
from .base import Acquired, Claim, Finish, Finished, Held, Orphan, Promotion, Start, Started
from .record import Mark, Record
from .record_followers import Follower

Reply = TypeVar("Reply")


class RecordedStore(ABC):
    """The acts of the contract over one method that changes a record atomically."""

    @abstractmethod
    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        """Run ``act(record, now_us)`` on the key's record and store what it left.

        No other process may see or change the record in between. ``act`` may run again on a fresh
        record, so it must have no other effect.
        """

    def acquire(self, key: str, claim: Claim) -> Acquired:
        return self._act(key, lambda record, us: acts.acquire(record, claim, us // 1000))

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        return [_or_unreadable(partial(self.acquire, key, claim)) for key, claim in claims]

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self._act(key, lambda record, us: acts.confirm(record, task_id, lease_ms, us // 1000))

    def confirm_many(self, confirmed: Sequence[tuple[str, str, int]]) -> None:
        for key, task_id, lease_ms in confirmed:
            self.confirm(key, task_id, lease_ms)

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        return self._act(
            key, lambda record, us: acts.give_back(record, task_id, mark_ms, us // 1000)
        )

    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        return self._act(
            key, lambda record, us: acts.help_holder(record, task_id, claim_ms, us // 1000)
        )

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        return self._act(key, lambda record, us: acts.cancel(record, task_id, mark_ms, us // 1000))

    def unmerge(self, key: str, call_id: str) -> bool:
        return self._act(key, lambda record, us: acts.unmerge(record, call_id, us // 1000))

    def release(self, key: str, task_id: str | None = None, lease: int = 0) -> int:
        return self._act(key, lambda record, us: acts.release(record, task_id, lease, us // 1000))

    def start(self, key: str, start: Start) -> Started:
        return self._act(key, lambda record, us: acts.start(record, start, us))

    def renew(self, held: Sequence[Held]) -> list[int | StoreUnavailable]:
        return [_or_unreadable(partial(self._renew_one, one)) for one in held]

    def _renew_one(self, held: Held) -> int:
        return self._act(held.key, lambda record, us: acts.renew(record, held, us // 1000))

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        self._act(
            key,
            lambda record, us: acts.retry(record, task_id, delivery, lease_ms, copies, us // 1000),
        )

    def finish(self, key: str, finish: Finish) -> Finished:
        return self._act(key, lambda record, us: acts.finish(record, finish, us // 1000))

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        self._act(key, lambda record, us: acts.settle(record, finish, mark_done, us // 1000))

    def forget(self, key: str, task_id: str) -> None:
        self._act(key, lambda record, us: acts.forget(record, task_id, us // 1000))

    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        return self._act(key, lambda record, us: acts.follow(record, claim, holder_id, us // 1000))

    def mark(self, key: str, task_id: str) -> Mark | None:
        return self._act(key, lambda record, us: record.mark_of(task_id, us // 1000))

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        return self._act(key, lambda record, us: acts.followers_of(record, holder_id, us // 1000))

    def complete_follower(self, key: str, follower_id: str) -> None:
        self._act(key, lambda record, us: acts.complete_follower(record, follower_id, us // 1000))

    def parked(self, key: str) -> list[str]:
        return self._act(key, lambda record, us: acts.parked_ids(record, us // 1000))

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        return self._act(key, lambda record, us: acts.reap(record, reaper, claim_ms, us // 1000))

    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        return self._act(
            key,
            lambda record, us: acts.promote(
                record, follower_id, reaper, grace_ms, mark_ms, us // 1000
            ),
        )


def _or_unreadable(act: Callable[[], Reply]) -> Reply | UnreadableRecord:
    """One of several: a record that cannot be read affects no other key."""
    try:
        return act()
    except UnreadableRecord as error:
        return error
