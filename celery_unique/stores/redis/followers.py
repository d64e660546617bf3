"""Followers in Redis: the acts on them, and which keys are due."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, ClassVar

from redis.exceptions import ResponseError

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.base import ORPHANS_AT_ONCE, Orphan, Promotion
from celery_unique.stores.record_followers import Follower, Joined

from . import scripts
from .commands import RedisActing, is_about_the_record

logger = logging.getLogger("celery_unique")


#: The guess is rather late: what is not due yet is sorted out, and what is must not be missed.
GUESSED_LATE_MS = 1000


class RedisFollowing(RedisActing):
    """The part of the store that is about followers."""

    #: How far the server's clock was ahead of this machine's when it was last seen.
    _server_ahead_ms = 0.0

    #: Which of them were reported: nothing else can be under these names for long.
    _unreadable_due_sets: ClassVar[set[str]] = set()

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        reply = self._run(scripts.FOLLOWERS, key, holder_id or "")
        found = []
        with self._reading(key):
            for follower_id, holder, value in zip(*[iter(reply)] * 3, strict=True):
                joined = joined_of(value)
                follower = Follower(holder.decode(), joined.message, not joined.group)
                found.append((joined.joined_at, follower_id.decode(), follower))
        found.sort(key=lambda one: one[:2])
        return [(follower_id, follower) for _, follower_id, follower in found]

    def complete_follower(self, key: str, follower_id: str) -> None:
        self._run(scripts.COMPLETE_FOLLOWER, key, follower_id)

    def due(self, limit: int = 20) -> list[str]:
        """One round trip, for what is due by a guess at the server's clock, which it corrects."""
        for _ in range(2):
            until = time.time() * 1000 + self._server_ahead_ms + GUESSED_LATE_MS
            ranges = [
                ("ZRANGE", name, "-inf", int(until), "BYSCORE", "LIMIT", 0, limit, "WITHSCORES")
                for name in self._layout.due_sets()
            ]
            clock, *replies = self._exchange([("TIME",), *ranges], None, None)
            if isinstance(clock, StoreUnavailable):  # it was to come from a server that is away
                now = int(until - GUESSED_LATE_MS)
                break
            now = self._now(self._checked([clock])[0])
            self._server_ahead_ms = now - time.time() * 1000
            if now <= until:
                break
        self._say_unreadable(replies)
        replies = [[] if _is_unreadable(reply) else reply for reply in replies]
        answered = [reply for reply in replies if not isinstance(reply, StoreUnavailable)]
        found = [
            (float(score), name)
            for reply in self._checked(answered)
            for name, score in zip(reply[::2], reply[1::2], strict=True)
        ]
        if not found:
            self._checked(replies)  # what is due on the others comes first
        due = [
            self._layout.key_of(name.decode(errors="replace"))
            for at, name in sorted(found)
            if at <= now
        ]
        return [key for key in due if key is not None][:limit]

    def _say_unreadable(self, replies: list[Any]) -> None:
        for name, reply in zip(self._layout.due_sets(), replies, strict=True):
            if _is_unreadable(reply) and name not in self._unreadable_due_sets:
                self._unreadable_due_sets.add(name)
                logger.warning(
                    "Redis holds something else than a sorted set under %s: followers of keys in "
                    "this bucket are not found when their holder dies. Delete it (said once)",
                    name,
                )

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        reply = self._run(scripts.REAP, key, reaper, claim_ms, ORPHANS_AT_ONCE)
        orphans = []
        with self._reading(key):
            for follower_id, holder, fate, value in zip(*[iter(reply)] * 4, strict=True):
                joined = joined_of(value)
                orphans.append(
                    Orphan(
                        follower_id.decode(),
                        holder.decode(),
                        joined.message,
                        not joined.group,
                        fate.decode(),
                    )
                )
        return orphans

    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        reply: Promotion = self._run(
            scripts.PROMOTE, key, follower_id, reaper, grace_ms, mark_ms
        ).decode()
        return reply


def _is_unreadable(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and is_about_the_record(reply)


def joined_of(value: bytes) -> Joined:
    """What a field of the second hash says: a line of JSON, and the message."""
    facts, _, message = value.partition(b"\n")
    return Joined.of(json.loads(facts), message.decode())
