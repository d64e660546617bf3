"""Duplicates that keep their own id and get the outcome of the task that holds their key."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Ignore
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError, OperationalError

import celery_unique
from celery_unique import DuplicateTask, IdempotencyKeyConflict, lookup
from celery_unique.config.app_state import state_of
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.promote import reap_orphans
from tests.support import eventually
from tests.support.app import advance, flush, locks, make_app, messages, value_of, working


@pytest.fixture
def rebuild(local_app: Celery) -> Any:
    @local_app.task(name="shop.rebuild", unique=True, unique_on="shop_id")
    def rebuild(shop_id: int, value: Any = None) -> Any:
        return value or shop_id

    @local_app.task(name="shop.echo")
    def echo(value: Any) -> Any:
        return value

    @local_app.task(name="shop.total")
    def total(values: list[int]) -> int:
        return sum(values)

    return rebuild


@pytest.fixture
def mine() -> str:
    """An id that no other test has: they share a result backend."""
    return uuid.uuid4().hex


def followers(task: Any, *args: Any) -> list[Any]:
    """The calls that follow whoever holds the key."""
    runtime = state_of(task.app)
    lock = lookup(task, args)
    found = runtime.store.followers(lock.key) if lock is not None else []
    return [FollowerCall.loads(task.app, follower.message) for _, follower in found]


def stored(app: Celery, task_id: str) -> tuple[str, Any]:
    """Asked anew: a result keeps the final state that it has seen."""
    result = app.AsyncResult(task_id)
    return result.state, result.result


# -- who follows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"link": []},
        {"headers": {"trace": "1"}},
        {"countdown": 5},
        {"ignore_result": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_duplicate_for_whose_id_nobody_waits_gets_the_holders(rebuild, options):
    holder = rebuild.delay(7)

    again = rebuild.apply_async((7,), **options)

    assert (again.outcome, again.id) == ("deduplicated", holder.id)
    assert followers(rebuild, 7) == []


def test_a_follower_is_told_of_as_a_duplicate(rebuild, caplog, mine, received):
    holder = rebuild.delay(7)
    conflicts = received(celery_unique.unique_conflict)

    with caplog.at_level(logging.INFO, "celery_unique"):
        again = rebuild.apply_async((7,), task_id=mine)

    assert (again.outcome, again.deduplicated, again.holder_state) == ("joined", True, "available")
    assert again.unique_key == holder.unique_key
    [facts] = conflicts
    assert (facts["sender"], facts["task_id"], facts["state"]) == (
        "shop.rebuild",
        holder.id,
        "available",
    )
    assert f"[{mine}] to holder {holder.id}" in caplog.text
    assert lookup(rebuild, (7,)).duplicates == 1


def test_the_same_call_once_more_follows_once(rebuild, mine):
    rebuild.delay(7)

    outcomes = [rebuild.apply_async((7,), task_id=mine).outcome for _ in range(2)]

    assert outcomes == ["joined", "joined"]
    assert [call.task_id for call in followers(rebuild, 7)] == [mine]


def test_under_an_idempotency_key_other_arguments_are_an_error_in_a_group_too(rebuild):
    rebuild.apply_async((7,), idempotency_key="k")

    with pytest.raises(IdempotencyKeyConflict):
        group(rebuild.s(8).set(idempotency_key="k"), rebuild.s(9))()

    assert followers(rebuild, 7) == []


def test_a_caller_who_may_not_know_the_holder_does_not_get_its_result(mine):
    app = make_app("memory://", unique_conceal_holder=True)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    rebuild.delay(7)

    with pytest.raises(DuplicateTask):
        rebuild.apply_async((7,), task_id=mine)
    member = group(rebuild.s(7), rebuild.s(8))().results[0]

    state, error = stored(app, member.id)
    assert (state, type(error)) == ("FAILURE", DuplicateTask)
    assert error.task_id is None


# -- the message of a follower -------------------------------------------------------------


def test_a_message_that_cannot_be_written_takes_no_lock(rebuild, mine):
    with pytest.raises(EncodeError):
        rebuild.apply_async((7, object()), task_id=mine)

    assert locks(rebuild.app) == []


def test_everything_that_a_message_needs_is_kept(rebuild, mine):
    rebuild.delay(7)
    call = rebuild.s(7, datetime(2026, 1, 2, tzinfo=UTC)).set(
        task_id=mine,
        countdown=60,
        expires=120,
        priority=3,
        time_limit=9,
        headers={"trace": "1"},
        queue=Queue("reports", Exchange("reports")),
        shadow="another name",
        link=rebuild.si(8),
    )
    canvas = chain(call, rebuild.si(9))
    canvas.stamp(tenant="a")
    now = datetime.now(UTC)

    canvas.apply_async()

    [kept] = followers(rebuild, 7)
    assert (kept.name, kept.args, kept.task_id) == (
        "shop.rebuild",
        [7, datetime(2026, 1, 2, tzinfo=UTC)],
        mine,
    )
    options = kept.options
    assert abs(datetime.fromisoformat(options["eta"]) - now - timedelta(seconds=60)).seconds < 5
    assert (
        abs(datetime.fromisoformat(options["expires"]) - now - timedelta(seconds=120)).seconds < 5
    )
    assert options["queue"] == "reports"
    assert (options["priority"], options["time_limit"], options["shadow"]) == (3, 9, "another name")
    assert options["headers"] == {"trace": "1"}
    assert (options["stamped_headers"], options["tenant"]) == (["tenant"], "a")
    assert options["root_id"] == mine
    request = kept.request()
    assert [link["task"] for link in request.chain] == ["shop.rebuild"]
    assert [link["args"] for link in request.callbacks] == [[8]]
    assert (request.stamps, request.trace) == ({"tenant": "a"}, "1")


def test_a_message_travels_in_the_format_of_the_task(mine):
    app = make_app("memory://", accept_content=["json", "pickle"])

    @app.task(name="shop.rebuild", unique=True, unique_on="shop_id", serializer="pickle")
    def rebuild(shop_id: int, value: Any = None) -> Any: ...

    rebuild.delay(7)

    rebuild.apply_async((7, {1, 2}), task_id=mine)

    assert [call.args for call in followers(rebuild, 7)] == [[7, {1, 2}]]


def test_a_message_in_a_format_that_workers_refuse_is_not_read(mine):
    sender = make_app("memory://", accept_content=["json", "pickle"], task_serializer="pickle")

    @sender.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> Any: ...

    rebuild.delay(7)
    rebuild.apply_async((7,), task_id=mine)
    [(_, kept)] = state_of(sender).store.followers(lookup(rebuild, (7,)).key)
    assert json.loads(kept.message)["type"] == "application/x-python-serialize"

    with pytest.raises(Exception, match=r"disallowed|untrusted"):
        FollowerCall.loads(make_app("memory://"), kept.message)


# -- the holder has ended ------------------------------------------------------------------


@pytest.fixture
def pay(local_app: Celery) -> Any:
    @local_app.task(name="shop.pay", unique=True, unique_states="until_success")
    def pay(order: int) -> str:
        return f"paid {order}"

    return pay


def run_to_its_end(task: Any, *args: Any, **options: Any) -> Any:
    with working(task.app):
        result = task.apply_async(args, **options)
        value_of(result)
        eventually(lambda: lookup(task, args).state == "completed")
    return result


def test_a_duplicate_of_an_ended_task_has_its_result_at_once(rebuild, pay, mine):
    run_to_its_end(pay, 1)

    again = pay.apply_async((1,), task_id=mine, link=pay.app.tasks["shop.echo"].s())

    assert (again.outcome, again.id) == ("joined", mine)
    assert stored(pay.app, mine) == ("SUCCESS", "paid 1")
    assert [(sent.task, sent.args) for sent in messages(pay.app)] == [("shop.echo", ["paid 1"])]
    assert messages(pay.app)[0].headers["parent_id"] == mine
    assert [child.id for child in again.children] == [messages(pay.app)[0].id]


def test_a_chord_of_an_ended_task_and_another_reaches_its_body(rebuild, pay):
    run_to_its_end(pay, 1)

    with working(pay.app):
        result = chord([pay.s(1), pay.s(1)], pay.app.tasks["shop.echo"].s())()

        assert value_of(result) == ["paid 1", "paid 1"]


def test_a_follower_of_an_ended_task_whose_result_is_gone_fails_and_says_why(rebuild, pay):
    first = run_to_its_end(pay, 1)
    first.forget()

    result = chain(pay.si(1), pay.app.tasks["shop.echo"].s())()

    state, error = stored(pay.app, result.id)
    assert (state, type(error)) == ("FAILURE", DuplicateTask)
    assert "its result is not stored" in str(error)
    assert error.task_id == first.id
    assert messages(pay.app) == []


def test_an_ended_idempotency_key_answers_in_a_canvas_whatever_the_strategy(rebuild):
    with working(rebuild.app):
        first = rebuild.apply_async((7,), idempotency_key="k")
        value_of(first)
        eventually(
            lambda: lookup(rebuild, idempotency_key="k").state == "completed",
        )

    member = rebuild.s(7).set(idempotency_key="k", unique_on_conflict="replace")
    result = group(member, rebuild.s(8))()

    assert stored(rebuild.app, result.results[0].id) == ("SUCCESS", 7)


# -- what is stored of it ------------------------------------------------------------------


@pytest.fixture(params=[1000, None], ids=["expires", "stays"])
def app_with_expiry(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Celery]:
    """Results in Redis, for a time or for ever."""
    app = make_app("memory://", result_backend=redis_url, result_expires=request.param)
    yield app
    app.close()


def test_the_result_of_a_follower_expires_like_any_other(app_with_expiry, mine):
    app = app_with_expiry

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    @app.task(name="shop.echo")
    def echo(value: Any) -> Any:
        return value

    holder, plain = rebuild.delay(7), echo.delay(1)
    follower = rebuild.apply_async((7,), task_id=mine)

    with working(app):
        assert [value_of(result) for result in (plain, holder, follower)] == [1, 7, 7]

    of_plain, of_holder, of_follower = (
        app.backend.client.ttl(app.backend.get_key_for_task(result.id))
        for result in (plain, holder, follower)
    )
    if app.conf.result_expires is None:
        assert (of_plain, of_holder, of_follower) == (-1, -1, -1)  # Redis: it does not expire
    else:
        assert (of_plain, of_holder, of_follower) == pytest.approx((1000, 1000, 1000), abs=60)


def is_kept(app: Celery, task_id: str) -> bool:
    """Whether anything at all is in the result backend under this id."""
    return app.backend.get(app.backend.get_key_for_task(task_id)) is not None


def test_a_follower_that_ignores_its_result_stores_none_and_its_link_fires(rebuild, mine):
    app = rebuild.app
    link = app.tasks["shop.echo"].s().set(task_id=f"link-{mine}")
    holder = rebuild.delay(7)
    follower = rebuild.apply_async((7,), task_id=mine, link=link, ignore_result=True)

    with working(app):
        assert value_of(app.AsyncResult(f"link-{mine}")) == 7
        eventually(lambda: followers(rebuild, 7) == [])

    assert follower.outcome == "joined"
    assert (is_kept(app, holder.id), is_kept(app, mine)) == (True, False)


def test_a_follower_has_a_result_though_its_holder_ignores_its_own(rebuild, mine):
    app = rebuild.app
    holder = rebuild.apply_async((7,), ignore_result=True)
    follower = rebuild.apply_async((7,), task_id=mine)

    with working(app):
        assert value_of(follower) == 7

    assert (is_kept(app, holder.id), is_kept(app, mine)) == (False, True)


def test_a_follower_of_a_task_that_ignores_results_stores_none_unless_its_call_says_so(
    local_app, mine
):
    @local_app.task(name="shop.quiet", unique=True, ignore_result=True)
    def quiet(shop_id: int) -> int:
        return shop_id

    quiet.delay(7)
    quiet.apply_async((7,), task_id=f"as-ever-{mine}")
    asked = quiet.apply_async((7,), task_id=mine, ignore_result=False)

    with working(local_app):
        assert value_of(asked) == 7
        eventually(lambda: locks(local_app) == [])

    assert not is_kept(local_app, f"as-ever-{mine}")


# -- strategies ----------------------------------------------------------------------------


def test_a_rejected_member_fails_under_its_own_id_and_the_others_run(rebuild):
    holder = rebuild.apply_async((7,), countdown=3600)

    with working(rebuild.app):
        result = group(rebuild.s(7).set(unique_on_conflict="reject"), rebuild.s(8))()

        rejected, other = result.results
        assert value_of(other) == 8
        error = rejected.get(propagate=False, timeout=10)
    assert isinstance(error, DuplicateTask)
    assert error.task_id == holder.id


def test_followers_of_a_replaced_task_follow_the_replacement(rebuild):
    rebuild.apply_async((7, "old"), countdown=3600)
    member = group(rebuild.s(7), rebuild.s(8))().results[0]
    replacement = rebuild.apply_async((7, "new"), unique_on_conflict="replace")

    with working(rebuild.app):
        assert value_of(replacement) == "new"
        assert value_of(member) == "new"


def test_a_rerun_is_a_follower_only_where_nothing_runs(rebuild, mine):
    rebuild.apply_async((7,), countdown=3600)

    again = rebuild.apply_async((7,), task_id=mine, unique_on_conflict="rerun")

    assert (again.outcome, again.id) == ("joined", mine)


# -- a holder that goes away ---------------------------------------------------------------


def test_followers_of_a_task_that_was_never_published_are_run(rebuild, mine):
    app = rebuild.app

    def broken(*args: Any, **options: Any) -> None:
        follower_ids.append(rebuild.apply_async((7,), task_id=mine).id)
        raise OperationalError("the broker is away")

    follower_ids: list[str] = []
    real, app.amqp.send_task_message = app.amqp.send_task_message, broken
    try:
        with pytest.raises(OperationalError):
            rebuild.delay(7)
    finally:
        app.amqp.send_task_message = real
    [key] = state_of(app).store.due()

    assert reap_orphans(state_of(app), key)

    assert follower_ids == [mine]
    assert [sent.id for sent in messages(app)] == [mine]
    with working(app):
        assert value_of(app.AsyncResult(mine)) == 7


def test_the_first_follower_of_a_lost_task_is_run_and_the_others_get_its_result(rebuild):
    app = rebuild.app
    rebuild.delay(7)
    members = group(rebuild.s(7) for _ in range(3))().results
    lost = messages(app)
    app.control.purge()
    advance(app, 25 * 3600)  # longer than its message may wait
    [key] = state_of(app).store.due()

    reap_orphans(state_of(app), key)

    assert len(lost) == len(messages(app)) == 1
    assert messages(app)[0].id in {member.id for member in members}
    with working(app):
        assert [value_of(member) for member in members] == [7, 7, 7]
    assert state_of(app).store.due() == []


def test_a_promoted_follower_that_could_not_be_published_is_published_later(rebuild, mine):
    app = rebuild.app
    rebuild.delay(7)
    rebuild.apply_async((7,), task_id=mine)
    app.control.purge()
    advance(app, 25 * 3600)
    [key] = state_of(app).store.due()

    def broken(*args: Any, **options: Any) -> None:
        raise OperationalError("the broker is away")

    real, app.amqp.send_task_message = app.amqp.send_task_message, broken
    try:
        with pytest.raises(OperationalError):
            reap_orphans(state_of(app), key)
    finally:
        app.amqp.send_task_message = real
    assert messages(app) == []
    assert state_of(app).store.due() == []

    advance(app, 120)
    [key] = state_of(app).store.due()
    reap_orphans(state_of(app), key)

    assert [sent.id for sent in messages(app)] == [mine]


def test_followers_of_a_revoked_task_are_revoked_with_it(rebuild):
    app = rebuild.app
    holder = rebuild.apply_async((7,), countdown=3600)
    result = chain(rebuild.si(7), app.tasks["shop.echo"].s())()

    holder.revoke()

    assert stored(app, result.parent.id)[0] == "REVOKED"
    assert stored(app, result.id)[0] == "REVOKED"
    assert state_of(app).store.due() == []


def test_a_follower_is_revoked_alone(rebuild, mine, caplog):
    app = rebuild.app
    rebuild.delay(7)
    one, other = (rebuild.apply_async((7,), task_id=name) for name in (mine, f"not-{mine}"))

    one.revoke()

    assert stored(app, mine)[0] == "REVOKED"
    assert "which other calls share" not in caplog.text
    with working(app):
        assert value_of(other) == 7
    assert stored(app, mine)[0] == "REVOKED"


def test_a_task_that_ignores_its_message_leaves_its_work_to_a_follower(local_app):
    runs: list[int] = []

    @local_app.task(name="shop.shy", unique=True)
    def shy(shop_id: int) -> int:
        runs.append(shop_id)
        if len(runs) == 1:
            raise Ignore
        return shop_id

    shy.delay(7)
    members = group(shy.s(7), shy.s(7))().results

    with working(local_app):
        assert [value_of(member) for member in members] == [7, 7]
    assert runs == [7, 7]


def test_an_expired_task_leaves_its_work_to_a_follower(rebuild):
    app = rebuild.app
    rebuild.apply_async((7, "expired"), expires=0.01)
    member = group(rebuild.s(7, "mine"), rebuild.s(8))().results[0]
    time.sleep(0.05)

    with working(app):
        assert value_of(member) == "mine"


def test_a_follower_that_cannot_be_completed_fails_and_holds_nobody_up(rebuild):
    """The next link of its chain cannot be written."""
    app = rebuild.app
    rebuild.delay(7)
    result = chain(rebuild.si(7), app.signature("shop.echo", ({},)).set(serializer="nothing"))()

    with working(app):
        eventually(lambda: stored(app, result.parent.id)[0] == "FAILURE")
    assert followers(rebuild, 7) == []


def test_nothing_is_left_behind_by_followers(rebuild):
    app = rebuild.app
    with working(app):
        results = [group(rebuild.s(n), rebuild.s(n), rebuild.s(n))() for n in range(5)]
        for result in results:
            result.get(timeout=10, interval=0.01)
        eventually(lambda: not locks(app))
    flush(app)
    assert state_of(app).store.due() == []
    advance(app, 30 * 24 * 3600)
    assert state_of(app).store.due() == []


def test_a_message_that_cannot_be_read_keeps_no_other_waiting(rebuild, mine):
    app, store = rebuild.app, state_of(rebuild.app).store
    rebuild.delay(7)
    key = lookup(rebuild, (7,)).key
    rebuild.apply_async((7,), task_id=f"first-{mine}")
    [(first, _)] = store.followers(key)
    kept = store._records[key].followers[first]
    store._records[key].followers[first] = replace(kept, message=kept.message.replace("json", "x"))
    rebuild.apply_async((7,), task_id=mine)
    app.control.purge()
    advance(app, 25 * 3600)

    reap_orphans(state_of(app), key)

    assert [sent.id for sent in messages(app)] == [mine]
