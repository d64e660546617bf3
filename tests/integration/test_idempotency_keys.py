"""Keys that callers bring, on every store: the test lists of the Flovyn seed, the table of error
scenarios of the tasks seed, and what the pages promise beyond them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, beat, chain, group, signature

from celery_unique import (
    DuplicateTask,
    IdempotencyKeyConflict,
    InvalidPolicy,
    Lock,
    StoreUnavailable,
    UniqueKeyError,
    apply_many,
    lookup,
    release,
    unique_conflict,
)
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import UniquePolicyWarning
from celery_unique.policy import policy as policies
from tests.support import eventually
from tests.support.app import advance, flush, locks, make_app, messages, value_of, working
from tests.support.worker import REPOSITORY

KEY = "job:batch_12345"


def task_of(app: Celery, name: str = "shop.pay", **options: Any) -> Any:
    """A task that fails for an amount below zero."""

    @app.task(name=name, shared=False, **options)
    def pay(account: str, amount: int = 10) -> int:
        if amount < 0:
            raise ValueError("an amount below zero")
        return amount

    return pay


@pytest.fixture
def pay(app: Celery) -> Any:
    return task_of(app)


def call(task: Any, *args: Any, key: Any = KEY, **options: Any) -> Any:
    return task.apply_async(args or ("a", 1), idempotency_key=key, **options)


def found(*args: Any, **kwargs: Any) -> Lock:
    lock = lookup(*args, **kwargs)
    assert lock is not None
    return lock


# -- Flovyn, phase 1: a key and a time to live on the call -----------------------------------------


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(None, 86400), (60, 60), (timedelta(minutes=1), 60), ("PT1M", 60), ("P7D", 604800)],
)
def test_phase_1_the_time_to_live_counts_from_the_first_call(app, pay, ttl, seconds):
    with working(app):
        first = call(pay, idempotency_ttl=ttl)
        value_of(first)
    flush(app)

    lock = found(pay, idempotency_key=KEY)
    assert lock.expires_at == lock.created_at + timedelta(seconds=seconds)
    advance(app, seconds - 30)
    assert call(pay).id == first.id
    advance(app, 31)
    assert lookup(pay, idempotency_key=KEY) is None
    assert call(pay).outcome == "created"


# -- Flovyn, phase 2: register and find -----------------------------------------------------------


def test_phase_2_create_for_task_and_lookup(app, pay):
    result = call(pay)
    flush(app)

    lock = found(pay, idempotency_key=KEY)

    assert (lock.task_id, lock.task_name, lock.state) == (result.id, "shop.pay", "available")
    assert lock.key == result.unique_key
    assert lock.window_ends_at == lock.created_at + timedelta(hours=24)
    assert KEY not in repr(lock)
    assert lookup(pay, idempotency_key="job:batch_12346") is None


def test_phase_2_the_same_key_with_other_work_is_a_conflict(app, pay):
    call(pay, "a", 1)

    with pytest.raises(IdempotencyKeyConflict) as caught:
        call(pay, "a", 2)

    error = caught.value
    assert error.key is not None
    for text in (str(error), repr(error)):
        assert KEY not in text
        assert error.key not in text
        assert "amount" not in text
    assert len(messages(app)) == 1


def test_phase_2_the_same_key_with_the_same_work_succeeds(app, pay):
    first = call(pay, "a", 10)

    again = [
        call(pay, "a", 10),
        call(pay, "a"),
        pay.apply_async(kwargs={"amount": 10, "account": "a"}, idempotency_key=KEY),
        call(pay, "a", 10, idempotency_ttl=60),
        call(pay, "a", 10, countdown=60),
        call(pay, "a", 10, queue="another"),
    ]

    assert {result.id for result in again} == {first.id}
    assert all(result.deduplicated for result in again)
    assert len(messages(app)) == 1
    assert found(pay, idempotency_key=KEY).duplicates == 6


def test_phase_2_release_lets_go_of_a_key(app, pay):
    first = call(pay)

    assert release(pay, idempotency_key=KEY) is True
    assert release(pay, idempotency_key=KEY) is False

    second = call(pay, "a", 2)
    assert (second.outcome, second.id != first.id) == ("created", True)


def test_phase_2_release_lets_go_of_a_task_that_has_ended(app, pay):
    with working(app):
        first = call(pay)
        value_of(first)

    assert found(pay, idempotency_key=KEY).state == "completed"
    assert release(pay, idempotency_key=KEY) is True
    assert call(pay).id != first.id


# -- Flovyn, phase 3: from within a task ----------------------------------------------------------


def test_phase_3_a_task_that_is_carried_out_again_schedules_its_subtask_once(app, pay):
    scheduled: list[Any] = []

    @app.task(name="workflow")
    def workflow(run: int) -> None:
        scheduled.append(call(pay, countdown=3600))

    with working(app):
        value_of(workflow.delay(1))
        value_of(workflow.delay(2))

    assert [result.outcome for result in scheduled] == ["created", "deduplicated"]
    assert scheduled[0].id == scheduled[1].id


def test_phase_3_a_conflict_is_an_error_of_the_call_that_made_it(app, pay):
    @app.task(name="workflow")
    def workflow() -> str:
        try:
            call(pay, "a", 2)
        except IdempotencyKeyConflict as error:
            return type(error).__name__
        return "published"

    call(pay, "a", 1, countdown=3600)
    with working(app):
        assert value_of(workflow.delay()) == "IdempotencyKeyConflict"


def test_phase_3_a_conflict_in_the_next_link_fails_that_link_alone(app, pay):
    @app.task(name="first")
    def first() -> int:
        return 1

    call(pay, "a", 1, countdown=3600)
    with working(app):
        result = chain(first.si(), pay.si("a", 2).set(idempotency_key=KEY))()

        with pytest.raises(IdempotencyKeyConflict):
            value_of(result)
        assert value_of(result.parent) == 1


# -- Flovyn, phase 4: new or existing --------------------------------------------------------------


def test_phase_4_the_answer_says_whether_the_task_is_new(app, pay):
    first, again = call(pay), call(pay)

    assert (first.outcome, first.deduplicated) == ("created", False)
    assert (again.outcome, again.deduplicated) == ("deduplicated", True)
    assert again.holder_state in ("pending", "available")


def test_phase_4_a_key_of_another_task_is_free_or_by_setting_a_conflict(app_with):
    by_task, by_app = app_with(), app_with(unique_idempotency_scope="app")
    for app, taken in ((by_task, False), (by_app, True)):
        pay, refund = task_of(app, "pay"), task_of(app, "refund")
        first = call(pay)

        if taken:
            with pytest.raises(IdempotencyKeyConflict):
                call(refund)
            assert found(idempotency_key=KEY, app=app).task_id == first.id
            assert found(refund, idempotency_key=KEY).task_name == "pay"
            assert call(pay).id == first.id
            assert release(idempotency_key=KEY, app=app)
            assert call(refund).outcome == "created"
        else:
            assert call(refund).outcome == "created"
            assert found(refund, idempotency_key=KEY).task_name == "refund"
            with pytest.raises(InvalidPolicy, match="task"):
                lookup(idempotency_key=KEY, app=app)


# -- Flovyn, phase 5: the five cases ---------------------------------------------------------------


def test_phase_5_schedule_task_with_idempotency_key(app, pay):
    results: list[Any] = []

    @app.task(name="workflow")
    def workflow() -> None:
        results.append(call(pay))

    with working(app):
        value_of(workflow.delay())
        assert value_of(results[0]) == 1

    assert found(pay, idempotency_key=KEY).task_id == results[0].id


def test_phase_5_schedule_task_idempotency_key_duplicate(app, pay):
    results: list[Any] = []

    @app.task(name="workflow", bind=True, max_retries=1)
    def workflow(self: Any) -> None:
        results.append(call(pay))
        if self.request.retries == 0:
            raise self.retry(countdown=0)

    with working(app):
        value_of(workflow.delay())

    assert results[0].id == results[1].id
    assert [result.outcome for result in results] == ["created", "deduplicated"]


def test_phase_5_submit_task_with_idempotency_key(app, pay):
    with working(app):
        result = call(pay)

        assert (result.outcome, value_of(result)) == ("created", 1)


def test_phase_5_submit_task_idempotency_key_existing(app, pay):
    with working(app):
        first = call(pay)
        value_of(first)
        again = call(pay)

        assert (again.id, again.holder_state) == (first.id, "completed")
        assert value_of(again) == 1


def test_phase_5_task_without_idempotency_key_backward_compatible(app, pay):
    first, second = pay.delay("a", 1), pay.delay("a", 1)

    assert first.id != second.id
    assert {first.outcome, second.outcome} == {"bypassed"}
    assert locks(app) == []


# -- how long a key answers ------------------------------------------------------------------------


def test_a_failed_task_frees_its_key(app, pay):
    with working(app):
        first = call(pay, "a", -1)
        first.get(timeout=10, propagate=False, interval=0.01)

        assert call(pay, "a", 1).outcome == "created"


def test_a_revoked_task_frees_its_key(app, pay):
    call(pay).revoke()

    assert call(pay, "a", 2).outcome == "created"


def test_a_waiting_task_keeps_its_key_beyond_its_time(app, pay):
    first = call(pay, idempotency_ttl=60)

    advance(app, 3600)

    assert call(pay).id == first.id
    with working(app):
        value_of(first)
    # Its time was over long before it ended, so nothing of it is kept.
    assert call(pay).outcome == "created"


def test_a_running_task_keeps_its_key_beyond_its_time(app):
    may_end = threading.Event()

    @app.task(name="slow")
    def slow() -> None:
        may_end.wait(20)

    with working(app):
        first = slow.apply_async(idempotency_key=KEY, idempotency_ttl=20)
        eventually(lambda: found(slow, idempotency_key=KEY).state == "active")
        advance(app, 30)  # less than the run lease, which is the worker's to renew
        again = slow.apply_async(idempotency_key=KEY)
        may_end.set()
        value_of(first)

    assert (again.id, again.holder_state) == (first.id, "active")


def test_a_window_of_the_task_does_not_shorten_a_key(app):
    pay = task_of(app, unique=True, unique_for=60, unique_states="window")
    with working(app):
        first = call(pay)
        value_of(first)

    advance(app, 3600)

    assert call(pay).id == first.id


def test_a_task_that_waits_for_its_retry_keeps_its_key(app):
    @app.task(name="flaky", bind=True, max_retries=1)
    def flaky(self: Any) -> None:
        raise self.retry(countdown=3600)

    with working(app):
        first = flaky.apply_async(idempotency_key=KEY)
        eventually(lambda: found(flaky, idempotency_key=KEY).state == "retryable")

        assert flaky.apply_async(idempotency_key=KEY).id == first.id


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("unique_for", 60, "idempotency_ttl: give that instead"),
        ("unique_states", "until_start", "until its task fails or idempotency_ttl has passed"),
        ("unique_on", "account", "replaces the arguments"),
        ("unique_key", "{account}", "replaces the arguments"),
    ],
)
def test_a_key_wins_over_what_the_call_says_besides_and_that_is_warned_of_once(
    local_app, monkeypatch, option, value, why
):
    monkeypatch.setattr(policies, "_warned", set())
    pay = task_of(local_app, unique=True)
    message = f"{option} has no effect in a call with an idempotency_key.*{why}"

    with pytest.warns(UniquePolicyWarning, match=message) as warned:
        first, again = (call(pay, **{option: value}) for _ in range(2))
    advance(local_app, 61)
    much_later = call(pay, **{option: value})

    assert len(warned) == 1
    assert KEY not in str(warned[0].message)
    assert (first.outcome, again.id, much_later.id) == ("created", first.id, first.id)
    with pytest.raises(IdempotencyKeyConflict):
        pay.apply_async(("a", 2), idempotency_key=KEY, **{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"unique_meta": "tenant"},
        {"unique_on_conflict": "reject"},
        {"unique": False},
        {"unique": {"keys": ["type"], "period": "PT1H"}},
    ],
)
def test_what_counts_beside_a_key_can_be_said(local_app, options):
    pay = task_of(local_app, unique=True, unique_for=60, unique_on="account")

    assert call(pay, headers={"tenant": "t"}, **options).outcome == "created"


# -- what is done with a duplicate -----------------------------------------------------------------


def test_reject_counts_on_the_task_on_the_call_and_as_the_apps_default(app_with):
    app = app_with()
    rejecting, plain = task_of(app, "r", unique=True, unique_on_conflict="reject"), task_of(app)
    defaulted_app = app_with(unique_default_on_conflict="reject")
    defaulted = task_of(defaulted_app, "d")

    for task, options in (
        (rejecting, {}),
        (plain, {"unique_on_conflict": "reject"}),
        (defaulted, {}),
    ):
        first = call(task)
        with pytest.raises(DuplicateTask) as caught:
            call(task, **options)
        assert caught.value.task_id == first.id
        assert "take a new idempotency_key for new work" in str(caught.value)


@pytest.mark.parametrize("on_conflict", ["reject", "replace", "replace_except_schedule", "rerun"])
def test_other_arguments_never_replace_or_follow_the_task_of_a_key(app, on_conflict):
    pay = task_of(app, unique=True, unique_on_conflict=on_conflict)
    first = call(pay, "a", 1)
    flush(app)

    with pytest.raises(IdempotencyKeyConflict):
        call(pay, "a", 2)

    assert found(pay, idempotency_key=KEY).task_id == first.id
    assert [sent.id for sent in messages(app)] == [first.id]


@pytest.mark.parametrize("on_conflict", ["replace", "replace_except_schedule", "rerun", "ignore"])
def test_a_task_that_succeeded_answers_under_every_strategy(app, on_conflict):
    pay = task_of(app, unique=True, unique_on_conflict=on_conflict)
    with working(app):
        first = call(pay)
        value_of(first)

        again = call(pay)

        assert (again.id, again.outcome, value_of(again)) == (first.id, "deduplicated", 1)
        with pytest.raises(IdempotencyKeyConflict):
            call(pay, "a", 2)


def test_replace_takes_the_place_of_a_task_that_waits(app):
    pay = task_of(app, unique=True, unique_on_conflict="replace")
    first = call(pay)
    flush(app)

    again = call(pay)

    assert (again.outcome, again.id != first.id) == ("replaced", True)
    flush(app)
    assert found(pay, idempotency_key=KEY).task_id == again.id


def test_under_rerun_the_same_key_is_not_carried_out_twice(app):
    may_end = threading.Event()

    @app.task(name="slow", unique=True, unique_on_conflict="rerun")
    def slow() -> None:
        may_end.wait(20)

    with working(app):
        first = slow.apply_async(idempotency_key=KEY)
        eventually(lambda: found(slow, idempotency_key=KEY).state == "active")
        again = slow.apply_async(idempotency_key=KEY)
        may_end.set()
        value_of(first)

    assert (again.id, again.outcome) == (first.id, "deduplicated")


def test_a_duplicate_sends_its_signal_without_the_callers_key(app, pay, received):
    conflicts = received(unique_conflict)

    call(pay)
    call(pay)

    assert len(conflicts) == 1
    assert KEY not in repr(conflicts)


# -- tenants ---------------------------------------------------------------------------------------


def test_a_tenant_in_the_headers_has_keys_of_its_own(app):
    pay = task_of(app, unique=True, unique_meta="tenant")

    ours = call(pay, headers={"tenant": "a"})
    theirs = call(pay, "a", 2, headers={"tenant": "b"})

    assert theirs.outcome == "created"
    assert call(pay, headers={"tenant": "a"}).id == ours.id
    with pytest.raises(UniqueKeyError, match="tenant"):
        call(pay)


@pytest.mark.parametrize("off", [{}, {"unique": False}, {"unique": None}])
def test_a_tenant_counts_also_where_uniqueness_is_switched_off(app, off):
    pay = task_of(app, unique=False, unique_meta="tenant")

    ours = call(pay, headers={"tenant": "a"}, **off)

    assert call(pay, headers={"tenant": "b"}, **off).id != ours.id
    assert call(pay, headers={"tenant": "a"}, **off).id == ours.id
    assert pay.apply_async(("a", 1), headers={"tenant": "a"}).outcome == "bypassed"


def test_a_tenant_can_be_a_rule_of_the_app(app_with):
    app = app_with(unique_default_meta="tenant", unique_idempotency_scope="app")
    pay = task_of(app)

    ours = call(pay, headers={"tenant": "a"})

    assert call(pay, headers={"tenant": "b"}).id != ours.id
    with pytest.raises(UniqueKeyError, match="key="):
        lookup(idempotency_key=KEY, app=app)


@pytest.mark.parametrize("act", [lookup, release])
def test_a_key_of_a_tenant_is_looked_up_by_the_key_of_the_result(app, act):
    pay = task_of(app, unique=True, unique_meta="tenant")
    result = call(pay, headers={"tenant": "a"})

    with pytest.raises(UniqueKeyError, match="key="):
        act(pay, idempotency_key=KEY)

    assert act(key=result.unique_key, app=app)


# -- secrets ---------------------------------------------------------------------------------------


def test_with_a_secret_a_key_is_another_one_and_works_alike(app_with):
    app, plain = app_with(unique_key_secret="s3cret"), make_app("memory://")
    pay = task_of(app)

    first = call(pay)

    assert first.unique_key != call(task_of(plain)).unique_key
    assert call(pay).id == first.id
    assert found(pay, idempotency_key=KEY).task_id == first.id
    with pytest.raises(IdempotencyKeyConflict):
        call(pay, "a", 2)
    assert release(pay, idempotency_key=KEY)


def test_neither_the_key_nor_the_arguments_are_in_the_store_or_the_message(app):
    pay = task_of(app)
    call(pay, "account-of-ada", 1)
    flush(app)

    [(key, record)] = list(state_of(app).store.walk())

    assert KEY not in key + record.dumps()
    assert "ada" not in key + record.dumps()
    [sent] = messages(app)
    assert KEY not in repr((sent.headers, sent.properties, sent.kwargs))


@pytest.mark.parametrize("on_conflict", ["ignore", "reject", "replace"])
def test_a_concealed_holder_is_not_told_by_a_finished_task_either(app_with, on_conflict):
    app = app_with(unique_conceal_holder=True)
    pay = task_of(app, unique=True, unique_on_conflict=on_conflict)
    with working(app):
        first = call(pay)
        value_of(first)

    with pytest.raises(DuplicateTask) as caught:
        call(pay)

    assert first.id not in f"{caught.value} {vars(caught.value)} {caught.value.to_ojs()}"
    with pytest.raises(IdempotencyKeyConflict) as mismatch:
        call(pay, "a", 2)
    assert first.id not in f"{mismatch.value} {vars(mismatch.value)} {mismatch.value.to_ojs()}"


# -- keys that are none ----------------------------------------------------------------------------

WRONG_KEYS = {
    "empty": "",
    "too long": "k" * 256,
    "a number": 7,
    "bytes": b"k",
    "a list": ["k"],
    "true": True,
    "a lone surrogate": "k\ud800",
}


@pytest.mark.parametrize("wrong", WRONG_KEYS)
@pytest.mark.parametrize("way", ["apply_async", "send_task", "apply", "lookup", "release"])
def test_a_key_that_is_none_is_refused_and_leaves_nothing(local_app, wrong, way):
    pay, key = task_of(local_app), WRONG_KEYS[wrong]
    ways: dict[str, Callable[[], Any]] = {
        "apply_async": lambda: call(pay, key=key),
        "send_task": lambda: local_app.send_task("shop.pay", ("a", 1), idempotency_key=key),
        "apply": lambda: pay.apply(("a", 1), idempotency_key=key),
        "lookup": lambda: lookup(pay, idempotency_key=key),
        "release": lambda: release(pay, idempotency_key=key),
    }

    with pytest.raises(UniqueKeyError, match="idempotency_key") as caught:
        ways[way]()

    assert caught.value.argument == "idempotency_key"
    assert messages(local_app) == []
    assert locks(local_app) == []


@pytest.mark.parametrize(
    "key",
    ["k", "k" * 255, "\U0001f600" * 255, "\u00e9" * 255, "\0", " ", "{}", "a b\n", "\U0001f511"],
)
def test_any_text_of_1_to_255_characters_is_a_key(local_app, key):
    pay = task_of(local_app)

    assert call(pay, key=key).id == call(pay, key=key).id
    assert found(pay, idempotency_key=key)


def test_none_is_no_key(app, pay):
    assert call(pay, key=None).outcome == "bypassed"


# -- every way to enqueue --------------------------------------------------------------------------

WAYS: dict[str, Callable[[Any], Any]] = {
    "apply_async": call,
    "signature": lambda task: task.s("a", 1).set(idempotency_key=KEY).apply_async(),
    "signature, at the call": lambda task: task.s("a", 1).apply_async(idempotency_key=KEY),
    "signature, delay": lambda task: task.si("a", 1).set(idempotency_key=KEY).delay(),
    "signature by name": lambda task: signature(
        "shop.pay", ("a", 1), {}, options={"idempotency_key": KEY}, app=task.app
    ).apply_async(),
    "signature as a dictionary": lambda task: signature(
        dict(task.s("a", 1).set(idempotency_key=KEY)), app=task.app
    ).apply_async(),
    "send_task": lambda task: task.app.send_task("shop.pay", ("a", 1), idempotency_key=KEY),
    "send_task, by keyword": lambda task: task.app.send_task(
        "shop.pay", kwargs={"account": "a", "amount": 1}, idempotency_key=KEY
    ),
    "chain of one": lambda task: chain(task.s("a", 1).set(idempotency_key=KEY)).apply_async(),
    "countdown": lambda task: call(task, countdown=60),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_counts_in_every_way_to_enqueue(local_app, way):
    pay = task_of(local_app)

    first = WAYS[way](pay)
    again = {each: WAYS[each](pay) for each in WAYS}

    assert first.outcome == "created"
    joined = again.pop("chain of one")  # a chain has given its link an id
    assert (joined.outcome, joined.deduplicated) == ("joined", True)
    assert {result.id for result in again.values()} == {first.id}
    assert len(messages(local_app)) == 1
    assert "idempotency_key" not in repr(messages(local_app)[0].properties)


def test_members_of_a_group_have_each_their_own_key(local_app):
    pay = task_of(local_app)
    members = [pay.s("a", n).set(idempotency_key=f"k{n}") for n in range(3)]

    group(members)()

    for n in range(3):
        assert call(pay, "a", n, key=f"k{n}").deduplicated


def test_the_links_of_a_chain_have_each_their_own_key(app, pay):
    with working(app):
        links = [pay.si("a", n).set(idempotency_key=f"k{n}") for n in (1, 2)]
        assert value_of(chain(*links)()) == 2

        assert call(pay, "a", 1, key="k1").holder_state == "completed"
        assert call(pay, "a", 2, key="k2").holder_state == "completed"


def test_a_sender_without_the_code_has_the_same_key(sqlite_url):
    worker, sender = make_app(sqlite_url), make_app(sqlite_url)
    pay = task_of(worker)

    first = sender.send_task("shop.pay", kwargs={"account": "a", "amount": 1}, idempotency_key=KEY)

    assert call(pay).id == first.id
    assert found("shop.pay", idempotency_key=KEY, app=sender).task_id == first.id
    with pytest.raises(UniqueKeyError, match="keyword"):
        sender.send_task("shop.pay", ("a", 1), idempotency_key=KEY)


def test_an_entry_of_beat_brings_its_key(local_app):
    task_of(local_app, unique=True, identity_strategy="caller_provided")
    local_app.conf.beat_schedule = {
        "pay": {
            "task": "shop.pay",
            "schedule": 0.001,
            "args": ("a", 1),
            "options": {"idempotency_key": KEY, "idempotency_ttl": "PT1H"},
        }
    }
    scheduler = beat.Scheduler(local_app)

    def tick() -> bool:
        scheduler.tick()
        lock = lookup("shop.pay", idempotency_key=KEY, app=local_app)
        return lock is not None and lock.duplicates >= 2

    eventually(tick, interval=0.002)

    assert len(messages(local_app)) == 1


SHOP = """
from pathlib import Path
from celery import Celery
import celery_unique
from tests.support import filesystem_settings

app = Celery("shop")
app.conf.update(filesystem_settings(Path(__file__).parent))
celery_unique.install(app, store_url=f"sqlite:///{Path(__file__).parent}/locks.sqlite3")

@app.task(name="shop.pay", unique=True, identity_strategy="caller_provided")
def pay(account): ...
"""


@pytest.mark.slow
def test_celery_call_has_no_option_for_a_key_and_says_what_is_missing(tmp_path):
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))

    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "shop", "call", "shop.pay", "--args", '["a"]'],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode != 0
    assert "IdempotencyKeyRequired" in done.stderr
    assert "idempotency_key=" in done.stderr
    assert not list((tmp_path / "queue").glob("*"))


# -- eager calls -----------------------------------------------------------------------------------


def test_eager_calls_run_and_take_no_lock(local_app):
    pay = task_of(local_app)

    results = [pay.apply(("a", n), idempotency_key=KEY) for n in (1, 2)]

    assert [result.get() for result in results] == [1, 2]
    assert {result.outcome for result in results} == {"bypassed"}
    assert locks(local_app) == []


def test_eager_calls_with_locks_answer_and_differ_as_others_do(app_with):
    app = app_with(unique_eager=True, task_always_eager=True)
    pay = task_of(app)

    first, again = call(pay), call(pay)

    assert (first.outcome, first.get()) == ("created", 1)
    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", "completed")
    with pytest.raises(IdempotencyKeyConflict):
        call(pay, "a", 2)
    failed = call(pay, "a", -1, key="failing")
    assert failed.failed()
    assert call(pay, "a", 3, key="failing").outcome == "created"


# -- the tasks seed: "Error Scenarios" -------------------------------------------------------------


def test_scenario_duplicate_submission_returns_the_existing_id(app, pay):
    assert call(pay).id == call(pay).id


def test_scenario_claimed_by_another_worker_the_second_delivery_does_not_run(app):
    """The claim is the gate: a copy of the message is not run beside the first."""
    may_end, ran = threading.Event(), []

    @app.task(name="slow")
    def slow() -> None:
        ran.append(1)
        may_end.wait(20)

    first = slow.apply_async(idempotency_key=KEY)
    [sent] = messages(app)
    with working(app, concurrency=2, pool="threads"):
        eventually(lambda: ran)
        # The very same message once more, as a broker delivers it again.
        with app.producer_or_acquire() as producer:
            producer.publish(
                ([], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}),
                routing_key=app.conf.task_default_queue,
                serializer="json",
                headers=sent.headers,
                correlation_id=sent.id,
            )
        eventually(lambda: not messages(app))
        may_end.set()
        value_of(first)

    assert ran == [1]


def test_scenario_a_worker_that_crashed_leaves_a_key_that_frees_itself(app, pay):
    first = call(pay)
    flush(app)
    # What a worker tells that starts the task, and then is gone.
    from celery_unique.testing.store_contract.factories import start

    store = state_of(app).store
    started = store.start(first.unique_key, start(first.id, "w1/1/1/1"))
    assert started.verdict == "run"
    assert call(pay).id == first.id

    advance(app, 24 * 3600 + 61)

    assert call(pay).outcome == "created"


def test_scenario_attempts_exhausted_the_task_failed_and_its_key_is_free(app):
    @app.task(name="flaky", bind=True, max_retries=1)
    def flaky(self: Any) -> None:
        raise self.retry(countdown=0, exc=ValueError("still no"))

    with working(app):
        first = flaky.apply_async(idempotency_key=KEY)
        with pytest.raises(ValueError, match="still no"):
            value_of(first)

        again = flaky.apply_async(idempotency_key=KEY)
        assert (again.outcome, again.id != first.id) == ("created", True)
        again.get(timeout=10, propagate=False, interval=0.01)


def test_scenario_storage_unavailable_the_call_fails_and_can_be_repeated():
    app = make_app("redis://127.0.0.1:1/0", unique_store_timeout=1)
    pay = task_of(app)

    with pytest.raises(StoreUnavailable) as caught:
        call(pay)

    assert caught.value.retryable
    assert messages(app) == []
    app.conf.unique_store_url = "memory://"
    assert call(pay).outcome == "created"


# -- Keys of one run of the calling task -----------------------------------------------------------


@pytest.fixture
def children(app, pay):
    """A parent that calls one child, with a key of its run; and what its calls returned."""
    results: list[Any] = []

    @app.task(name="parent", shared=False)
    def parent(**options: Any) -> None:
        results.append(call(pay, **{"idempotency_scope": "run", **options}))

    def run(run_id: str, **options: Any) -> Any:
        parent.apply((), options, task_id=run_id, throw=True)
        return results[-1]

    return run


def test_a_key_of_a_run_is_one_child_of_each_run(children, pay):
    first = children("run-1")

    assert first.outcome == "created"
    assert children("run-1").id == first.id
    other = children("run-2")
    assert (other.outcome, other.id != first.id) == ("created", True)
    # It is no key of the task.
    assert call(pay).outcome == "created"
    assert children("run-1", idempotency_scope=None).outcome == "deduplicated"


def test_a_key_of_a_run_names_its_arguments(children, app, pay):
    children("run-1")

    @app.task(name="other parent", shared=False)
    def parent() -> None:
        pay.apply_async(("a-2", 99), idempotency_key=KEY, idempotency_scope="run")

    with pytest.raises(IdempotencyKeyConflict):
        parent.apply(task_id="run-1", throw=True)


def test_outside_of_a_task_a_key_of_a_run_is_an_error(app, pay):
    with pytest.raises(UniqueKeyError) as raised:
        call(pay, idempotency_scope="run")

    assert str(raised.value) == (
        "shop.pay gets no unique key: its idempotency_key has the scope 'run', and no task is "
        "running that makes the call. Make the call in the body of a task, or pass "
        "idempotency_scope='task'"
    )
    assert raised.value.argument == "idempotency_scope"
    with pytest.raises(UniqueKeyError, match="no task is running"):
        pay.apply(("a-1", 10), idempotency_key=KEY, idempotency_scope="run")


def test_the_setting_makes_every_key_one_of_a_run(app_with):
    app = app_with(unique_idempotency_scope="run")
    pay = task_of(app, "pay")
    seen: list[Any] = []

    @app.task(name="parent", shared=False)
    def parent() -> None:
        seen.append((call(pay).id, lookup(pay, idempotency_key=KEY).task_id))

    parent.apply(task_id="run-1")
    parent.apply(task_id="run-1")

    assert seen[0] == seen[1] == (seen[0][0],) * 2
    with pytest.raises(UniqueKeyError, match="no task is running"):
        call(pay)
    assert call(pay, idempotency_scope="task").outcome == "created"
    with pytest.raises(InvalidPolicy, match="give task_id= or key= of the result"):
        lookup(pay, idempotency_key=KEY)
    with pytest.raises(InvalidPolicy, match=r"unique_idempotency_scope='run'\): give the task"):
        lookup(idempotency_key=KEY, app=app)


def test_a_child_is_one_with_apply_many_and_with_canvas(app, pay):
    member = pay.s("a-1", 10).set(idempotency_key=KEY, idempotency_scope="run")
    seen: list[Any] = []

    @app.task(name="parent", shared=False)
    def parent() -> None:
        seen.extend(result.id for result in apply_many([member, member]))
        seen.append(member.apply_async().id)

    parent.apply(task_id="run-1", throw=True)
    parent.apply(task_id="run-1", throw=True)

    assert len(seen) == 6
    assert len(set(seen)) == 1
