"""Eager calls: carried out on the spot, without a lock unless the app asks for one."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.result import allow_join_result

import celery_unique
from celery_unique import (
    DuplicateTask,
    IdempotencyKeyRequired,
    InvalidPolicy,
    UniqueEagerResult,
    lookup,
)
from celery_unique.publish import eager
from tests.support.app import locks, make_app, messages


@pytest.fixture
def app() -> Celery:
    return make_app("memory://", task_always_eager=True)


@pytest.fixture
def locking_app() -> Celery:
    return make_app("memory://", task_always_eager=True, unique_eager=True)


def rebuild_of(app: Celery, **options: Any) -> Any:
    @app.task(name="shop.rebuild", **{"unique": True, **options})
    def rebuild(shop_id: int, full: bool = False) -> int:
        return shop_id

    return rebuild


# -- without locks, as is the default --------------------------------------------------------


def test_an_eager_call_runs_and_takes_no_lock(app):
    rebuild = rebuild_of(app)

    results = [rebuild.delay(7), rebuild.delay(7), rebuild.apply((7,)), rebuild.s(7).apply()]

    assert [each.get() for each in results] == [7] * 4
    assert {type(each) for each in results} == {UniqueEagerResult}
    assert {each.outcome for each in results} == {"bypassed"}
    assert {(each.deduplicated, each.unique_key, each.holder_state) for each in results} == {
        (False, None, None)
    }
    assert locks(app) == []
    assert messages(app) == []


def test_apply_runs_on_the_spot_where_calls_are_not_eager():
    app = make_app("memory://")
    rebuild = rebuild_of(app)
    holder = rebuild.delay(8)

    result = rebuild.apply((8,))

    assert (result.get(), result.outcome) == (8, "bypassed")
    assert lookup(rebuild, (8,)).task_id == holder.id


def test_an_eager_canvas_runs_every_member(app):
    rebuild = rebuild_of(app)

    @app.task(name="total")
    def total(values: list[int]) -> int:
        return sum(values)

    assert group(rebuild.s(7), rebuild.s(7))().get() == [7, 7]
    assert chain(rebuild.s(7), rebuild.s())().get() == 7
    assert chord([rebuild.s(7), rebuild.s(7)], total.s())().get() == 14


def test_an_eager_call_hands_the_options_of_the_library_to_nobody(app):
    @app.task(bind=True, unique=True)
    def look(self: Any) -> Any:
        return self.request.unique, sorted(vars(self.request))

    result = look.apply_async(unique_for=60, unique_on_conflict="reject")

    lock, attributes = result.get()
    assert lock is None
    assert not [name for name in attributes if name.startswith("unique_for")]


@pytest.mark.parametrize(
    "options",
    [
        {"unique_fro": 60},
        {"unique_for": "banana"},
        {"unique_on": "shop"},
        {"unique_on_conflict": "drop"},
        {"unique_on": "shop_id", "unique_key": "{shop_id}"},
        {"idempotency_ttl": 60},
    ],
    ids="+".join,
)
def test_wrong_options_are_errors_in_eager_calls_too(app, options):
    rebuild = rebuild_of(app)

    with pytest.raises(InvalidPolicy):
        rebuild.apply_async((7,), **options)
    with pytest.raises(InvalidPolicy):
        rebuild.apply((7,), **options)


def test_a_missing_idempotency_key_is_an_error_in_eager_calls_too(app):
    rebuild = rebuild_of(app, identity_strategy="caller_provided")

    for call in (rebuild.apply_async, rebuild.apply):
        with pytest.raises(IdempotencyKeyRequired):
            call((7,))
        assert call((7,), idempotency_key="order-7").get() == 7


def test_the_result_can_be_copied_and_pickled(app):
    result = rebuild_of(app).delay(7)

    for twin in (pickle.loads(pickle.dumps(result)), copy.copy(result)):
        assert isinstance(twin, UniqueEagerResult)
        assert (twin.id, twin.get(), twin.outcome) == (result.id, 7, "bypassed")


# -- with locks, where the app asks for them --------------------------------------------------


def test_with_unique_eager_the_lock_is_held_while_the_body_runs(locking_app):
    seen = []

    @locking_app.task(name="look", unique=True)
    def look() -> None:
        seen.append(lookup("look", app=locking_app))

    result = look.delay()

    assert (result.outcome, result.deduplicated) == ("created", False)
    assert (seen[0].task_id, seen[0].state, seen[0].key) == (
        result.id,
        "active",
        result.unique_key,
    )
    assert locks(locking_app) == []


def test_with_unique_eager_an_ended_task_answers_within_its_window(locking_app):
    rebuild = rebuild_of(locking_app, unique_for=60, unique_states="window")
    first = rebuild.delay(7)

    again = rebuild.delay(7)

    assert (first.outcome, first.get()) == ("created", 7)
    assert (again.outcome, again.id, again.holder_state) == ("deduplicated", first.id, "completed")
    assert isinstance(again, UniqueEagerResult)


def test_with_unique_eager_a_duplicate_is_rejected_by_its_policy(locking_app):
    rebuild = rebuild_of(locking_app, unique_states="window", unique_on_conflict="reject")
    first = rebuild.delay(7)

    with pytest.raises(DuplicateTask) as rejected:
        rebuild.delay(7)

    assert rejected.value.task_id == first.id


@pytest.mark.parametrize("propagates", [True, False])
def test_with_unique_eager_a_failure_frees_the_key(locking_app, propagates):
    locking_app.conf.task_eager_propagates = propagates

    @locking_app.task(name="fail", unique=True, unique_states="until_success")
    def fail() -> None:
        raise ZeroDivisionError

    if propagates:
        with pytest.raises(ZeroDivisionError):
            fail.delay()
    else:
        assert fail.delay().state == "FAILURE"

    assert locks(locking_app) == []


def test_with_unique_eager_a_retry_is_not_its_own_duplicate(locking_app):
    attempts = []

    @locking_app.task(
        name="flaky", unique=True, autoretry_for=(ConnectionError,), max_retries=3, retry_backoff=0
    )
    def flaky() -> int:
        attempts.append(lookup("flaky", app=locking_app).task_id)
        if len(attempts) < 3:
            raise ConnectionError
        return len(attempts)

    result = flaky.delay()

    assert result.get() == 3
    assert attempts == [result.id] * 3
    assert locks(locking_app) == []


def test_with_unique_eager_a_task_that_calls_itself_runs_again(locking_app):
    depth = []

    @locking_app.task(name="poll", unique=True, bind=True)
    def poll(self: Any) -> None:
        depth.append(1)
        if len(depth) < 3:
            assert self.delay().outcome == "bypassed"

    poll.delay()

    assert len(depth) == 3
    assert locks(locking_app) == []


def test_with_unique_eager_a_canvas_still_runs_every_member(locking_app):
    rebuild = rebuild_of(locking_app)

    assert group(rebuild.s(7), rebuild.s(7))().get() == [7, 7]
    assert chain(rebuild.s(7), rebuild.s())().get() == 7


# -- with locks, inside a body ----------------------------------------------------------------


@pytest.fixture
def digest(locking_app: Celery) -> Any:
    """Counts how often it has run: ``digest.runs``."""

    @locking_app.task(name="digest", unique=True, unique_states="window", unique_for=60)
    def digest(user: int) -> str:
        digest.runs += 1
        return f"sent to {user}"

    digest.runs = 0

    @locking_app.task(name="echo")
    def echo(value: Any) -> Any:
        return value

    return digest


def inside(app: Celery, body: Any) -> Any:
    """What ``body`` returns when a task runs it."""
    seen = []

    @app.task(name="outer")
    def outer() -> None:
        seen.append(body())

    outer.delay()
    return seen[0]


def forget_what_ended() -> None:
    """As if it had ended in another process."""
    eager._ended.clear()


def test_with_unique_eager_calls_from_a_body_are_unique(locking_app, digest):
    def calls() -> Any:
        first, again = digest.delay(7), digest.delay(7)
        with pytest.raises(DuplicateTask) as rejected:
            digest.apply_async((7,), unique_on_conflict="reject")
        return first, again, rejected.value

    first, again, rejected = inside(locking_app, calls)

    assert (first.outcome, again.outcome) == ("created", "deduplicated")
    assert (again.id, rejected.task_id, rejected.state) == (first.id, first.id, "completed")
    assert digest.runs == 1


def test_with_unique_eager_a_task_that_is_called_back_while_it_runs_is_a_duplicate(locking_app):
    seen = []

    @locking_app.task(name="ping", unique=True)
    def ping() -> None:
        locking_app.tasks["pong"].delay()

    @locking_app.task(name="pong")
    def pong() -> None:
        seen.append(ping.delay())

    first = ping.delay()

    assert [(each.id, each.outcome, each.holder_state) for each in seen] == [
        (first.id, "deduplicated", "active")
    ]
    assert (seen[0].state, seen[0].get()) == ("PENDING", None)  # nobody knows it yet


def test_with_unique_eager_a_task_that_replaces_itself_goes_on_under_its_id(locking_app, digest):
    @locking_app.task(name="hand_over", bind=True)
    def hand_over(self: Any) -> Any:
        return self.replace(digest.si(7))

    digest.delay(7)

    assert hand_over.apply().get() == "sent to 7"
    assert digest.runs == 2


def test_with_unique_eager_a_retry_of_a_call_that_ran_without_a_lock_runs_too(locking_app):
    attempts = []

    @locking_app.task(name="flaky", unique=True, unique_states="window", max_retries=2, bind=True)
    def flaky(self: Any) -> int:
        attempts.append(self.request.id)
        if len(attempts) == 2:
            raise self.retry(countdown=0)
        return len(attempts)

    flaky.delay()
    again = flaky.apply_async(link=[flaky.si()])

    assert again.outcome == "bypassed"
    assert again.get() == 3


def test_with_unique_eager_a_rejected_callback_does_not_fail_what_it_follows(
    locking_app, digest, caplog
):
    digest.delay(7)
    callback = digest.s().set(unique_on_conflict="reject")

    result = locking_app.tasks["echo"].apply_async((7,), link=callback)

    assert (result.state, result.get()) == ("SUCCESS", 7)
    assert digest.runs == 1
    assert "fails: digest was not published" in caplog.text


# -- with locks, the value of a duplicate -----------------------------------------------------


def test_with_unique_eager_a_duplicate_has_the_outcome_of_the_task_that_ended(digest):
    first = digest.delay(7)

    again, applied = digest.delay(7), digest.apply((7,))

    for each in (again, applied):
        assert (each.id, each.outcome) == (first.id, "deduplicated")
        assert (each.state, each.get(), each.successful()) == ("SUCCESS", "sent to 7", True)
    assert digest.runs == 1


@pytest.mark.parametrize("propagates", [True, False])
def test_with_unique_eager_a_duplicate_has_the_failure_of_the_task_that_ended(
    locking_app, propagates
):
    locking_app.conf.task_eager_propagates = propagates

    @locking_app.task(name="fail", unique=True, unique_states="window", unique_for=60)
    def fail() -> None:
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        fail.delay()

    again = fail.delay()

    assert (again.outcome, again.state) == ("deduplicated", "FAILURE")
    with pytest.raises(ZeroDivisionError):
        again.get()


def test_with_unique_eager_the_outcome_of_a_task_that_ended_elsewhere_is_not_known(digest):
    first = digest.delay(7)
    forget_what_ended()

    again = digest.delay(7)

    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", "completed")
    assert (again.state, again.get()) == ("PENDING", None)
    assert digest.runs == 1


def test_with_unique_eager_only_what_holds_its_key_is_remembered(locking_app):
    forget_what_ended()

    rebuild_of(locking_app).delay(7)

    assert len(eager._ended) == 0


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_with_unique_eager_a_canvas_goes_on_with_the_value_of_the_holder(
    locking_app, digest, known, nested
):
    echo = locking_app.tasks["echo"]
    digest.delay(7)

    def forget() -> None:
        if not known:
            forget_what_ended()

    def canvases() -> Any:
        with allow_join_result():
            forget()
            yield chain(digest.s(7), echo.s())().get()
            forget()
            yield chain(echo.s(7), digest.s(), echo.s()).apply().get()
            forget()
            yield group(digest.s(7), echo.s(7))().get()
            forget()
            yield chord([digest.s(7), echo.s(7)], echo.s())().get()

    values = inside(locking_app, lambda: list(canvases())) if nested else list(canvases())

    assert values == ["sent to 7", "sent to 7", ["sent to 7", 7], ["sent to 7", 7]]
    # Where nobody knows what the first one returned, each runs: better twice than without a value.
    assert digest.runs == (1 if known else 5)


def test_with_unique_eager_a_duplicate_in_a_canvas_that_runs_is_logged_as_that(
    locking_app, digest, caplog
):
    first = digest.delay(7)
    forget_what_ended()

    result = chain(digest.s(7), locking_app.tasks["echo"].s())()

    assert result.parent.outcome == "bypassed"
    assert (
        f"running digest[{result.parent.id}] without a lock: task {first.id} holds its key"
    ) in caplog.text
    assert "publishing " not in caplog.text


def test_with_unique_eager_a_rejected_member_of_a_group_fails_alone(locking_app, digest):
    digest.delay(7)

    result = group(digest.s(7).set(unique_on_conflict="reject"), digest.s(8))()

    refused, beside = result.results
    assert (refused.state, beside.get()) == ("FAILURE", "sent to 8")
    with pytest.raises(DuplicateTask):
        refused.get()


def test_with_unique_eager_a_call_from_the_body_of_a_canvas_member_is_not_in_the_canvas(
    locking_app, digest
):
    first = digest.delay(7)
    seen = []

    @locking_app.task(name="member")
    def member() -> None:
        forget_what_ended()
        seen.append(digest.apply((7,)))

    chain(member.si(), member.si())()

    assert [each.id for each in seen] == [first.id] * 2
    assert digest.runs == 1


def test_with_unique_eager_the_signals_are_sent(locking_app):
    seen = []

    def hear(signal: Any, sender: str, task_id: str, **_: Any) -> None:
        seen.append((signal.name, sender, task_id))

    told = [celery_unique.unique_acquired, celery_unique.unique_released]
    for each in told:
        each.connect(hear)
    try:
        result = rebuild_of(locking_app).delay(7)
    finally:
        for each in told:
            each.disconnect(hear)

    assert sorted(seen) == [
        ("unique_acquired", "shop.rebuild", result.id),
        ("unique_released", "shop.rebuild", result.id),
    ]
