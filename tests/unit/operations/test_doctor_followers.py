"""Who follows, who is overdue, and which fail-overs are told of, from what was read and told."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique.config.app_state import AppState, state_of
from celery_unique.operations.doctor import failovers
from celery_unique.operations.doctor.failovers import failovers_seen
from celery_unique.operations.doctor.followers import Followed, no_followers_yet
from celery_unique.publish.stale_holders.workers import Workers
from celery_unique.stores.failover import FailOver
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record_followers import Following
from celery_unique.testing.store_contract.factories import GRACE, advance, claim, confirm, now_of

KEY = "1:" + "ab" * 32
EVERY_S = 20.0
PATIENCE_MS = 51_000  # two and a half rounds, and a second


@pytest.fixture
def store() -> MemoryStore:
    """A holder with three followers, looked at by nobody."""
    store = MemoryStore()
    store.acquire(KEY, claim("holder"))
    for follower in "abc":
        joined = store.acquire(KEY, claim(follower, join="its message"))
        assert joined.outcome == "joined"
    return store


@pytest.fixture
def runtime() -> AppState:
    app = Celery("doctor", set_as_current=False)
    app.conf.update(unique_store_url="memory://", unique_run_lease=EVERY_S * 3)
    celery_unique.install(app)
    return state_of(app)


def seen(store: MemoryStore) -> Followed:
    followed = Followed(EVERY_S)
    for _, record in store.walk():
        following = record.following or Following()
        followed.see(following, now_of(store))
    return followed


def test_followers_of_a_living_task_are_counted(store):
    confirm(store, KEY, "holder")

    followed = seen(store)

    assert (followed.calls, followed.overdue) == (3, 0)
    assert not list(followed.findings())
    assert "3 calls follow another one" in followed.right()


def test_followers_are_overdue_once_several_rounds_should_have_met_them(store):
    advance(store, GRACE + PATIENCE_MS - 5000)
    in_time = seen(store)
    advance(store, 10_000)

    late = seen(store)

    assert (in_time.calls, in_time.overdue) == (3, 0)
    assert (late.calls, late.overdue) == (3, 3)
    [finding] = late.findings()
    assert (finding.check, finding.level) == ("followers", "warning")
    assert "3 of 3 calls" in finding.message
    assert re.search(r"due for a check (5[6-9]|6\d) s ago", finding.message)
    assert "they follow holder" in finding.message
    assert "start a worker" in finding.cure


def test_followers_that_a_worker_has_claimed_are_not_overdue(store):
    advance(store, GRACE + PATIENCE_MS + 5000)
    assert store.reap(KEY, "worker", 60_000)

    claimed = seen(store)
    advance(store, 60_000 + PATIENCE_MS + 5000)

    assert (claimed.calls, claimed.overdue) == (3, 0)
    assert seen(store).overdue == 3


def test_a_promoted_follower_is_counted_with_those_that_follow_it(store):
    advance(store, GRACE + 1000)
    first = store.reap(KEY, "worker", 60_000)[0]
    assert store.promote(KEY, first.follower_id, "worker", GRACE, GRACE) == "publish"

    assert seen(store).calls == 3


def test_it_is_asked_less_of_workers_that_look_less_often(runtime):
    alone = no_followers_yet(runtime, Workers())
    slow = no_followers_yet(runtime, Workers(replies={"w": {"renewal": {"every_s": 90.0}}}))
    broken = no_followers_yet(runtime, Workers(replies={"w": {"renewal": None}}))

    assert [each.checked_every_s for each in (alone, slow, broken)] == [EVERY_S, 90.0, EVERY_S]


# -- fail-overs ----------------------------------------------------------------------------------


def told(before: str, after: str, at_s: int) -> dict[str, Any]:
    return {"before": before, "after": after, "noticed_at_ms": at_s * 1000}


def test_a_fail_over_is_one_whoever_noticed_it(runtime):
    runtime.failovers.append(FailOver("a:1", "b:1", noticed_at=50.0))
    workers = Workers(
        replies={
            "v@h": {"failovers": [told("a:1", "b:1", 40), told("b:1", "a:1", 90)]},
            "w@h": {"failovers": [told("a:1", "b:1", 60)]},
            "older release": {},
        }
    )

    first, second = failovers_seen(runtime, workers)

    assert first.as_document() == {
        "before": "a:1",
        "after": "b:1",
        "noticed_at": datetime(1970, 1, 1, 0, 1, 0, tzinfo=UTC),
        "noticed_by": ["v@h", "w@h", "this process"],
    }
    assert (second.before, second.after, second.noticed_by) == ("b:1", "a:1", ["v@h"])
    notes = list(failovers.findings([first, second]))
    assert {(note.check, note.level) for note in notes} == {("fail-over", "note")}
    assert "from a:1 to b:1, noticed at 1970-01-01 00:01:00 UTC by v@h and 2 more" in str(notes[0])
    assert "1970-01-01 00:01:30 UTC by v@h:" in notes[1].message
