"""Workers go first in an upgrade, and not always: a message of a newer release is handled, and what
this one does not know of its header is carried along."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_unique import lookup
from celery_unique.header import HEADER
from tests.support.app import flush, locks, messages, value_of, working

pytestmark = pytest.mark.versions

UNKNOWN = {"v": 2, "colour": "blue", "nested": {"list": [1, None, {"x": 2.5}]}}


@pytest.fixture
def app(local_app: Celery) -> Celery:
    return local_app


def make_newer(app: Celery, task_id: str) -> dict[str, Any]:
    """Rewrite the waiting message as a newer release would have sent it: its header."""
    flush(app)
    [header] = [sent.headers[HEADER] for sent in messages(app) if sent.id == task_id]
    header.update(UNKNOWN)
    return dict(header)


def test_the_header_of_a_call_is_the_pinned_one(app):
    @app.task(name="shop.rebuild", unique=True, unique_for=600, unique_states="window")
    def rebuild(shop_id: int) -> None: ...

    first = rebuild.delay(7)

    [sent] = messages(app)
    lock = lookup(rebuild, (7,))
    assert lock is not None
    assert sent.headers[HEADER] == {
        "v": 1,
        "id": first.id,
        "key": first.unique_key,
        "store": "memory",
        "at": round(lock.created_at.timestamp() * 1000),
        "window": 600_000,
        "keep": "cdx",
    }


def test_a_newer_header_survives_a_retry_and_its_lock_is_held_and_given_back(app):
    seen: list[dict[str, Any]] = []

    @app.task(name="shop.rebuild", unique=True, bind=True)
    def rebuild(self: Any, shop_id: int) -> str:
        lock = lookup(rebuild, (7,))
        seen.append(
            {
                "header": dict(getattr(self.request, HEADER)),
                "lock": (lock.task_id, lock.state) if lock else None,
                "mine": self.request.unique.still_mine(),
            }
        )
        if len(seen) < 3:
            raise self.retry(countdown=0)
        return "rebuilt"

    first = rebuild.delay(7)
    sent = make_newer(app, first.id)
    with working(app):
        assert value_of(first) == "rebuilt"

        assert lookup(rebuild, (7,)) is None
    assert len(seen) == 3
    of_the_worker = ("delivery", "token", "by", "again", "watched")
    for run in seen:
        carried = {k: v for k, v in run["header"].items() if k not in of_the_worker}
        assert carried == sent
        assert run["lock"] == (first.id, "active")
        assert run["mine"]
    deliveries = [run["header"]["delivery"] for run in seen]
    assert len(set(deliveries)) == 3
    assert [run["header"].get("by") for run in seen] == [None, *deliveries[:2]]


def test_a_newer_message_that_was_replaced_is_dropped_at_the_gate(app):
    ran: list[int] = []

    @app.task(name="shop.rebuild", unique=True, unique_on="shop_id", unique_on_conflict="replace")
    def rebuild(shop_id: int, number: int) -> int:
        ran.append(number)
        return number

    first = rebuild.delay(7, 1)
    make_newer(app, first.id)
    second = rebuild.delay(7, 2)
    make_newer(app, second.id)
    with working(app):
        assert value_of(second) == 2

    assert first.state == "REVOKED"
    assert ran == [2]
    assert locks(app) == []
