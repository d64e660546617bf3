"""Many locks of several tasks, states and ages, and a plain account of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from celery_unique.stores.base import Claim, LockStore, Start

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WORKER = "busy@crowd"

#: Of every ten locks: task, state, age in hours.
KINDS = (
    ("shop.rebuild_index", "available", 0),
    ("shop.rebuild_index", "available", 3),
    ("shop.rebuild_index", "active", 0),
    ("shop.rebuild_index", "scheduled", 0),
    ("shop.send_digest", "available", 0),
    ("shop.send_digest", "available", 30),
    ("shop.send_digest", "active", 3),
    ("shop.import_all", "pending", 0),
    ("shop.import_all", "available", 3),
    ("other.app_task", "available", 30),
)


@dataclass(frozen=True)
class Member:
    key: str
    task_id: str
    task: str
    state: str
    hours: int


def gather(store: LockStore, count: int) -> list[Member]:
    """Take the locks, the older ones first by an earlier clock."""
    members = [_member(n) for n in range(count)]
    for hours in (30, 3, 0):
        mine = [member for member in members if member.hours == hours]
        store.clock_offset_ms = -hours * HOUR_MS
        claims = [(member.key, _claim(member)) for member in mine]
        for first in range(0, len(claims), 500):
            store.acquire_many(claims[first : first + 500])
        for member in mine:
            if member.state != "pending":
                store.confirm(member.key, member.task_id, 3 * DAY_MS)
        store.flush()
        for member in mine:
            if member.state == "active":
                store.start(member.key, _start(member))
    store.clock_offset_ms = 0
    return members


def _member(n: int) -> Member:
    task, state, hours = KINDS[n % len(KINDS)]
    digest = hashlib.sha256(f"member {n}".encode()).hexdigest()
    return Member(f"1:{digest}", f"id-{n:05d}", task, state, hours)


def _claim(member: Member) -> Claim:
    return Claim(
        task_id=member.task_id,
        task_name=member.task,
        states="pswrt",
        grace_ms=3 * DAY_MS,
        delay_ms=DAY_MS if member.state == "scheduled" else 0,
    )


def _start(member: Member) -> Start:
    return Start(
        task_id=member.task_id,
        delivery=f"{WORKER}/1/boot/{member.task_id}",
        task_name=member.task,
        lease_ms=3 * DAY_MS,
        run_lease_ms=3 * DAY_MS,
    )
