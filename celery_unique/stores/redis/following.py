"""Followers in Redis: the acts on them, and which keys are due."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from celery_unique.stores.base import ORPHANS_AT_ONCE, Orphan, Promotion
from celery_unique.stores.following import Follower, Joined

from . import scripts
from .connections import Command
from .layout import Layout
from .scripts import Script


class RedisFollowing(ABC):
    """The part of the store that is about followers."""

    _layout: Layout

    @abstractmethod
    def _run(self, script: Script, key: str, *arguments: str | int) -> Any: ...

    @abstractmethod
    def _ask(self, commands: Sequence[Command], about: Sequence[str] = ()) -> list[Any]: ...

    @abstractmethod
    def _now(self, clock: list[bytes]) -> int: ...

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        reply = self._run(scripts.FOLLOWERS, key, holder_id or "")
        found = []
        for follower_id, holder, value in zip(*[iter(reply)] * 3, strict=True):
            joined = joined_of(value)
            follower = Follower(holder.decode(), joined.message, not joined.group)
            found.append((joined.joined_at, follower_id.decode(), follower))
        found.sort(key=lambda one: one[:2])
        return [(follower_id, follower) for _, follower_id, follower in found]

    def complete_follower(self, key: str, follower_id: str) -> None:
        self._run(scripts.COMPLETE_FOLLOWER, key, follower_id)

    def due(self, limit: int = 20) -> list[str]:
        """The first of every bucket's set, in one round trip; the clock tells which are due."""
        ranges = [("ZRANGE", name, 0, limit - 1, "WITHSCORES") for name in self._layout.due_sets()]
        clock, *replies = self._ask([("TIME",), *ranges])
        now = self._now(clock)
        waiting = [
            (float(score), name)
            for reply in replies
            for name, score in zip(reply[::2], reply[1::2], strict=True)
        ]
        due = [self._layout.key_of(name.decode()) for at, name in sorted(waiting) if at <= now]
        return [key for key in due if key is not None][:limit]

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        reply = self._run(scripts.REAP, key, reaper, claim_ms, ORPHANS_AT_ONCE)
        orphans = []
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


def joined_of(value: bytes) -> Joined:
    """What a field of the second hash says: a line of JSON, and the message."""
    facts, _, message = value.partition(b"\n")
    return Joined.of(json.loads(facts), message.decode())
