"""``replace``, ``replace_except_schedule`` and ``rerun`` through the public API, on every store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_unique import DuplicateTask, StoreUnavailable, lookup, unique_superseded
from celery_unique.config.app_state import state_of
from celery_unique.reporting import unique_acquired
from tests.integration.test_publish_failures import SlowPublish, raising, replace_publish
from tests.support import eventually
from tests.support.app import (
    Sent,
    advance,
    flush,
    locks,
    make_app,
    messages,
    value_of,
    working,
)


class Shop:
    """A task whose key is the shop alone, and a body that waits for the test's word."""

    def __init__(self, app: Celery, **options: Any) -> None:
        self.app = app
        self.ran: list[int] = []
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.retries = False

        @app.task(name="shop.rebuild", bind=True, unique=True, unique_on="shop", **options)
        def rebuild(task: Any, shop: int, value: int = 0) -> int:
            self.ran.append(value)
            if self.retries and task.request.retries == 0:
                raise task.retry(countdown=3600)
            self.began.set()
            assert self.may_end.wait(20)
            return value

        self.task = rebuild

    def call(self, value: int = 0, **options: Any) -> Any:
        result = self.task.apply_async((7, value), **options)
        flush(self.app)
        return result

    @property
    def holder(self) -> Any:
        flush(self.app)
        return lookup(self.task, (7,))


@pytest.fixture
def superseded(received: Any) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = received(unique_superseded, without=("app", "key"))
    return facts


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def stored_state(app: Celery, result: Any) -> tuple[str, str]:
    stored = app.AsyncResult(result.id)
    return stored.state, str(stored.result)


def eta_of(sent: Sent) -> datetime | None:
    eta = sent.headers["eta"]
    return None if eta is None else datetime.fromisoformat(eta)


REPLACING = ["replace", "replace_except_schedule"]


# -- OJS scenario 6, and the official case -----------------------------------------------


@pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")
def test_06_the_original_is_cancelled_and_the_new_one_is_enqueued(app):
    """The steps of the specification's case L4-UNIQ-003."""
    policy = {
        "keys": ["type"],
        "on_conflict": "replace",
        "states": ["available", "active", "retryable", "scheduled"],
    }
    ran: list[int] = []

    @app.task(name="unique.test.replace_duplicate")
    def generate(job: dict[str, Any]) -> None:
        ran.append(job["version"])

    first = generate.apply_async(({"action": "report", "version": 1},), unique=policy)
    second = generate.apply_async(({"action": "report", "version": 2},), unique=policy)
    flush(app)

    assert (first.outcome, second.outcome) == ("created", "replaced")
    assert second.id != first.id
    assert stored_state(app, first) == ("REVOKED", f"superseded by task {second.id}")
    lock = lookup(key=second.unique_key, app=app)
    assert lock is not None
    assert (lock.task_id, lock.state) == (second.id, "available")
    with working(app):
        value_of(second)
        eventually(lambda: not state_of(app).store.read(second.unique_key)[0])
    assert ran == [2]


# -- what the call hears -----------------------------------------------------------------


def test_a_call_that_replaces_is_told_so_and_the_signals_are_sent(
    app, superseded, received, caplog
):
    shop = Shop(app, unique_on_conflict="replace")
    first = shop.call(1)
    acquired = received(unique_acquired)

    with caplog.at_level(logging.INFO, logger="celery_unique"):
        second = shop.call(2)

    assert (second.outcome, second.deduplicated, second.holder_state) == ("replaced", False, None)
    assert second.unique_key == first.unique_key
    assert superseded == [{"sender": "shop.rebuild", "task_id": first.id, "by": second.id}]
    assert [facts["task_id"] for facts in acquired] == [second.id]
    assert f"superseded shop.rebuild[{first.id}] by task {second.id}" in caplog.messages
    assert [sent.id for sent in messages(app)] == [first.id, second.id]


def test_whoever_waits_for_a_replaced_task_hears_of_it_at_once(app):
    shop = Shop(app, unique_on_conflict="replace")
    first = shop.call(1)

    second = shop.call(2)

    with pytest.raises(TaskRevokedError, match=f"superseded by task {second.id}"):
        value_of(first)


def test_a_task_without_results_is_replaced_without_one(app):
    shop = Shop(app, unique_on_conflict="replace", ignore_result=True)
    first = shop.call(1)

    assert shop.call(2).outcome == "replaced"

    assert app.AsyncResult(first.id).state == "PENDING"


def test_a_result_backend_that_fails_does_not_fail_the_call(app, monkeypatch, caplog):
    shop = Shop(app, unique_on_conflict="replace")
    shop.call(1)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no backend")

    monkeypatch.setattr(type(app.backend), "mark_as_revoked", fail)
    with caplog.at_level(logging.WARNING, logger="celery_unique"):
        second = shop.call(2)

    assert second.outcome == "replaced"
    assert "is not stored yet" in caplog.text


# -- the table: every state of the holder ------------------------------------------------


@pytest.mark.parametrize("strategy", REPLACING)
@pytest.mark.parametrize(("countdown", "state"), [(None, "available"), (600, "scheduled")])
def test_a_holder_that_waits_is_replaced(app, strategy, countdown, state):
    shop = Shop(app, unique_on_conflict=strategy)
    first = shop.call(1, countdown=countdown)
    assert shop.holder.state == state

    second = shop.call(2)

    assert second.outcome == "replaced"
    assert shop.holder.task_id == second.id
    assert stored_state(app, first)[0] == "REVOKED"


@pytest.mark.parametrize("strategy", REPLACING)
def test_a_pending_holder_is_replaced_and_its_message_is_dropped(app, background, strategy):
    shop = Shop(app, unique_on_conflict=strategy)
    shop.may_end.set()
    slow = SlowPublish(app)
    first = background.submit(shop.call, 1)
    slow.began.wait(10)

    second = shop.call(2)
    slow.let_go.set()

    assert (first.result(10).outcome, second.outcome) == ("created", "replaced")
    assert len(messages(app)) == 2
    with working(app):
        assert value_of(second) == 2
        eventually(lambda: not state_of(app).store.read(second.unique_key)[0])
    assert shop.ran == [2]


@pytest.mark.parametrize("strategy", REPLACING)
def test_a_holder_that_waits_for_its_retry_is_replaced(app, strategy):
    shop = Shop(app, unique_on_conflict=strategy)
    shop.retries = True
    shop.may_end.set()

    with working(app):
        first = shop.call(1)
        eventually(lambda: shop.holder.state == "retryable", ignoring=AttributeError)
        # Celery stores it a moment later.
        eventually(lambda: stored_state(app, first)[0] == "RETRY")
        shop.retries = False
        second = shop.call(2)

        assert second.outcome == "replaced"
        assert value_of(second) == 2
    assert stored_state(app, first) == ("REVOKED", f"superseded by task {second.id}")
    assert shop.ran == [1, 2]


@pytest.mark.parametrize("strategy", REPLACING)
def test_an_active_holder_rejects_and_says_why(app, strategy):
    shop = Shop(app, unique_on_conflict=strategy)

    with working(app):
        first = shop.call(1)
        assert shop.began.wait(10)
        with pytest.raises(DuplicateTask) as rejected:
            shop.call(2)
        shop.may_end.set()
        assert value_of(first) == 1

    assert (rejected.value.task_id, rejected.value.state) == (first.id, "active")
    assert rejected.value.reason == "a task that runs cannot be replaced"
    assert "a task that runs cannot be replaced" in str(rejected.value)
    assert rejected.value.to_ojs()["error"]["code"] == "duplicate"
    assert shop.ran == [1]


def test_with_concealed_holders_the_reason_does_not_tell_the_holders_state():
    app = make_app("memory://", unique_conceal_holder=True)
    shop = Shop(app, unique_on_conflict="replace")

    with working(app):
        first = shop.call(1, idempotency_key="k")
        assert shop.began.wait(10)
        with pytest.raises(DuplicateTask) as while_it_runs:
            shop.call(1, idempotency_key="k")
        shop.may_end.set()
        assert value_of(first) == 1
    with pytest.raises(DuplicateTask) as after_its_end:
        shop.call(1, idempotency_key="k")

    told = [(str(error.value), vars(error.value)) for error in (while_it_runs, after_its_end)]
    assert told[0] == told[1]
    assert while_it_runs.value.reason == "what holds it cannot be replaced"


def test_until_start_a_call_waits_beside_the_active_task_and_is_replaced(app):
    shop = Shop(app, unique_on_conflict="replace", unique_states="until_start")

    with working(app):
        shop.call(1)
        assert shop.began.wait(10)
        outcomes = [shop.call(value).outcome for value in (2, 3)]
        shop.may_end.set()
        eventually(lambda: 3 in shop.ran)
        eventually(lambda: locks(app) == [])

    assert outcomes == ["created", "replaced"]
    assert shop.ran == [1, 3]


@pytest.mark.parametrize("strategy", REPLACING)
def test_an_ended_holder_that_is_kept_is_not_in_the_way(app, strategy):
    shop = Shop(app, unique_on_conflict=strategy, unique_states="window", unique_for=600)
    shop.may_end.set()

    with working(app):
        value_of(shop.call(1))
        second = shop.call(2)

        assert second.outcome == "created"
        assert value_of(second) == 2


@pytest.mark.parametrize("strategy", REPLACING)
def test_a_call_with_the_holders_own_id_cannot_replace_it(app, strategy):
    shop = Shop(app, unique_on_conflict=strategy)
    shop.call(1, task_id="order-7")

    with pytest.raises(DuplicateTask) as rejected:
        shop.call(2, task_id="order-7")

    assert rejected.value.reason == "the call has the id of the task that it would replace"


# -- schedules ---------------------------------------------------------------------------


def test_the_message_carries_the_schedule_that_is_kept(app):
    shop = Shop(app, unique_on_conflict="replace_except_schedule")
    eta = datetime.now(UTC) + timedelta(hours=1)
    shop.call(1, eta=eta)

    second = shop.call(2, eta=eta + timedelta(hours=5))
    third = shop.call(3)

    kept = [eta_of(sent) for sent in messages(app) if sent.id in (second.id, third.id)]
    assert len(kept) == 2
    for each in kept:
        assert each is not None
        assert abs(each - eta) < timedelta(seconds=5)
    assert abs(shop.holder.eta - eta) < timedelta(seconds=5)


def test_without_a_schedule_to_keep_it_is_as_replace(app):
    shop = Shop(app, unique_on_conflict="replace_except_schedule")
    shop.call(1)

    second = shop.call(2, countdown=600)

    assert second.outcome == "replaced"
    assert shop.holder.state == "scheduled"


def test_replace_brings_a_scheduled_task_forward(app):
    shop = Shop(app, unique_on_conflict="replace")
    shop.call(1, countdown=600)

    shop.call(2)

    assert shop.holder.state == "available"
    assert eta_of(messages(app)[-1]) is None


# -- the publish fails -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", REPLACING)
def test_a_replacement_that_cannot_be_published_leaves_the_old_holder(app, superseded, strategy):
    shop = Shop(app, unique_on_conflict=strategy)
    shop.may_end.set()
    first = shop.call(1)
    replace_publish(app, raising(OperationalError("no broker")))

    with pytest.raises(OperationalError, match="no broker"):
        shop.call(2)

    assert shop.holder.task_id == first.id
    assert superseded == []
    assert stored_state(app, first)[0] == "PENDING"
    with working(app):
        assert value_of(first) == 1
    assert shop.ran == [1]


def test_a_confirm_that_the_store_did_not_hear_is_told_later(app, monkeypatch):
    """Else the old task, which callers were told is revoked, would run after the grace."""
    shop = Shop(app, unique_on_conflict="replace")
    first = shop.call(1)
    store = state_of(app).store
    confirm, failures = store.confirm, [StoreUnavailable("away")]

    def fail_once(*args: Any) -> None:
        if failures:
            raise failures.pop()
        confirm(*args)

    monkeypatch.setattr(store, "confirm", fail_once)
    second = shop.call(2)

    assert second.outcome == "replaced"
    available = (second.id, "available")
    eventually(lambda: (shop.holder.task_id, shop.holder.state) == available)
    assert store.read(second.unique_key)[0].marks[first.id].by == second.id


def lands_and_raises(original: Callable[..., Any]) -> Callable[..., Any]:
    done: list[bool] = []

    def send(*args: Any, **options: Any) -> Any:
        sent = original(*args, **options)
        if not done:
            done.append(True)
            raise OperationalError("no answer from the broker")
        return sent

    return send


def test_a_replacement_that_landed_although_its_publish_raised_does_not_run(app):
    shop = Shop(app, unique_on_conflict="replace")
    shop.may_end.set()
    first = shop.call(1)
    replace_publish(app, lands_and_raises)

    with pytest.raises(OperationalError):
        shop.call(2)

    with working(app):
        assert value_of(first) == 1
        eventually(lambda: not state_of(app).store.read(first.unique_key)[0])
    assert shop.ran == [1]


def test_a_successor_that_cannot_be_published_leaves_the_older_one(app):
    shop = Shop(app, unique_on_conflict="rerun")

    with working(app):
        shop.call(1)
        assert shop.began.wait(10)
        older = shop.call(2)
        replace_publish(app, raising(OperationalError("no broker")))
        with pytest.raises(OperationalError):
            shop.call(3)
        shop.may_end.set()

        assert value_of(older) == 2
    assert shop.ran == [1, 2]


# -- rerun -------------------------------------------------------------------------------


def test_one_running_plus_one_queued_with_the_newest_arguments(app, superseded):
    shop = Shop(app, unique_on_conflict="rerun")

    with working(app):
        first = shop.call(1)
        assert shop.began.wait(10)
        second, third = shop.call(2), shop.call(3)
        shop.may_end.set()
        assert value_of(third) == 3
        assert value_of(first) == 1

    assert (second.outcome, second.deduplicated, second.holder_state) == ("rerun", False, "active")
    assert (third.outcome, third.deduplicated, third.holder_state) == ("rerun", True, "active")
    assert len({first.id, second.id, third.id}) == 3
    assert superseded == [{"sender": "shop.rebuild", "task_id": second.id, "by": third.id}]
    assert stored_state(app, second) == ("REVOKED", f"superseded by task {third.id}")
    assert shop.ran == [1, 3]


@pytest.mark.parametrize("countdown", [None, 600])
def test_rerun_of_a_holder_that_has_not_started_is_its_duplicate(app, countdown):
    shop = Shop(app, unique_on_conflict="rerun")
    first = shop.call(1, countdown=countdown)

    second = shop.call(2)

    assert (second.id, second.outcome, second.deduplicated) == (first.id, "deduplicated", True)


def test_rerun_of_an_ended_holder_that_is_kept_is_its_duplicate(app):
    shop = Shop(app, unique_on_conflict="rerun", unique_states="window", unique_for=600)
    shop.may_end.set()

    with working(app):
        first = shop.call(1)
        value_of(first)

        second = shop.call(2)

    assert (second.id, second.holder_state) == (first.id, "completed")


def test_a_task_that_calls_itself_is_its_own_successor(app):
    ran: list[int] = []
    heard: list[tuple[str, bool]] = []

    @app.task(name="poll", bind=True, unique=True, unique_on="shop")
    def poll(self: Any, shop: int, number: int = 1) -> None:
        ran.append(number)
        if number < 5:
            again = self.apply_async((shop, number + 1))
            heard.append((again.outcome, again.deduplicated))

    with working(app):
        poll.delay(7)
        eventually(lambda: len(ran) == 5)
        eventually(lambda: locks(app) == [])

    assert ran == [1, 2, 3, 4, 5]
    assert heard == [("rerun", False)] * 4


def test_a_retry_is_no_call_of_its_own(app):
    """Of a task whose policy replaces, too: it goes on under its own id and lock."""
    ran: list[int] = []

    @app.task(name="flaky", bind=True, unique=True, unique_on_conflict="replace", max_retries=2)
    def flaky(self: Any, shop: int) -> int:
        ran.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return shop

    with working(app):
        assert value_of(flaky.delay(7)) == 7

    assert ran == [0, 1, 2]


# -- recipes -----------------------------------------------------------------------------


def test_max_wait_bounds_how_long_a_task_is_pushed_back(app):
    shop = Shop(app, unique_on_conflict="replace", unique_max_wait=30)
    shop.call(0, countdown=20)
    first_eta = shop.holder.eta
    etas = []
    for value in (1, 2, 3):
        advance(app, 8)
        shop.call(value, countdown=20)
        etas.append(round((shop.holder.eta - first_eta).total_seconds()))

    # Created at 0 s, its ETA was 20 s; calls at 8, 16 and 24 s; never later than 30 s.
    assert etas == [8, 10, 10]


def test_a_task_that_has_waited_for_max_wait_is_not_replaced_any_more(app):
    """However slow the queue: calls come after it, and give way to each other."""
    shop = Shop(app, unique_on_conflict="replace", unique_max_wait=30)
    shop.may_end.set()
    shop.call(0)
    due = shop.call(1)
    advance(app, 31)

    later, latest = shop.call(2), shop.call(3)

    assert (due.outcome, later.outcome, latest.outcome) == ("replaced", "rerun", "rerun")
    assert later.holder_state == "available"
    with working(app):
        assert value_of(latest) == 3
    assert shop.ran == [1, 3]


def test_throttle_runs_at_the_leading_edge_of_a_window(app):
    shop = Shop(app, unique_for=60, unique_states="until_success")
    shop.may_end.set()

    with working(app):
        value_of(shop.call(1))
        within = shop.call(2)
        advance(app, 61)
        after = shop.call(3)
        value_of(after)

    assert (within.outcome, after.outcome) == ("deduplicated", "created")
    assert shop.ran == [1, 3]


def test_throttle_runs_at_the_trailing_edge_of_a_window(app):
    shop = Shop(app, unique_on_conflict="replace_except_schedule", unique_states="until_start")

    results = [shop.call(value, countdown=60) for value in range(5)]

    assert [result.outcome for result in results] == ["created"] + ["replaced"] * 4
    assert shop.holder.task_id == results[-1].id
    waits_s = (shop.holder.eta - shop.holder.created_at).total_seconds()
    assert 50 < waits_s <= 60


# -- eager -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*REPLACING, "rerun"])
def test_an_eager_call_runs_whatever_the_strategy(local_app, strategy):
    local_app.conf.task_always_eager = True
    shop = Shop(local_app, unique_on_conflict=strategy)
    shop.may_end.set()

    assert [shop.task.delay(7, value).get() for value in (1, 2)] == [1, 2]
