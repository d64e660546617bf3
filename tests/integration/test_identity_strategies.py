"""Identity strategies: the tables of the Tasker seed, through the public API, on every store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from celery_unique import (
    DuplicateTask,
    IdempotencyKeyConflict,
    IdempotencyKeyRequired,
    InvalidPolicy,
    UniquePolicy,
    lookup,
    time_bucket,
)
from tests.support.app import advance, locks, make_app, messages

STRATEGIES = ("strict", "caller_provided", "always_unique")


def task_of(app: Celery, strategy: str | None, name: str = "shop.pay", **options: Any) -> Any:
    if strategy is not None:
        options["identity_strategy"] = strategy

    @app.task(name=name, unique=True, **options)
    def pay(context: Any) -> Any:
        return context

    return pay


# -- "Why This Matters": the task says whether equal calls are one ----------------------------


@pytest.mark.parametrize(
    ("use_case", "strategy", "tasks"),
    [
        ("payment processing", "strict", 1),
        ("nightly batch job", "always_unique", 2),
        ("report generation", "strict", 1),
        ("report generation", "always_unique", 2),
        ("event-driven triggers", "always_unique", 2),
        ("retry with same params", "always_unique", 2),
    ],
)
def test_equal_calls_are_one_or_several_as_the_use_case_wants(app, use_case, strategy, tasks):
    task = task_of(app, strategy, use_case)

    results = [task.delay({"id": 1}), task.delay({"id": 1})]

    assert len({result.id for result in results}) == tasks
    assert len(messages(app)) == tasks


# -- STRICT ------------------------------------------------------------------------------------


def test_strict_is_the_default(app):
    pay = task_of(app, None)

    assert pay.delay({"id": 1}).id == pay.delay({"id": 1}).id
    assert UniquePolicy().identity_strategy == "strict"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"user_id": 123, "action": "create"}, {"action": "create", "user_id": 123}, True),
        ({"b": {"d": 1, "c": [{"y": 1, "x": 2}]}}, {"b": {"c": [{"x": 2, "y": 1}], "d": 1}}, True),
        ({"amount": 100.0}, {"amount": 100}, True),
        ({"items": [1, 2]}, {"items": [2, 1]}, False),
        ({"id": 1}, {"id": "1"}, False),
        ({"id": 1}, {"id": 1, "more": None}, False),
    ],
)
def test_strict_contexts_are_normalised(app, one, other, same):
    pay = task_of(app, "strict")

    assert (pay.delay(one).id == pay.delay(other).id) is same


# -- CALLER_PROVIDED ---------------------------------------------------------------------------


def test_caller_provided_the_key_alone_makes_the_identity(app):
    fulfil = task_of(app, "caller_provided")
    context = {"order_id": "ORD-98765", "items": [1, 2]}

    first = fulfil.apply_async((context,), idempotency_key="ORD-98765")
    again = fulfil.apply_async((context,), idempotency_key="ORD-98765")
    other = fulfil.apply_async((context,), idempotency_key="ORD-98766")

    assert (again.id, again.outcome) == (first.id, "deduplicated")
    assert other.outcome == "created"


@pytest.mark.parametrize(
    "call",
    [
        lambda task: task.delay({}),
        lambda task: task.apply_async(({},), idempotency_key=None),
        lambda task: task.s({}).apply_async(),
        lambda task: task.app.send_task("shop.pay", ({},)),
    ],
)
def test_caller_provided_a_missing_key_is_refused_and_leaves_nothing(app, call):
    fulfil = task_of(app, "caller_provided")

    with pytest.raises(IdempotencyKeyRequired):
        call(fulfil)

    assert messages(app) == []
    assert locks(app) == []


# -- ALWAYS_UNIQUE -----------------------------------------------------------------------------


def test_always_unique_every_call_is_a_task(app):
    send = task_of(app, "always_unique")

    results = [send.delay({"user_id": 123, "template": "welcome"}) for _ in range(3)]

    assert len({result.id for result in results}) == 3
    assert [sent.id for sent in messages(app)] == [result.id for result in results]
    assert {result.outcome for result in results} == {"bypassed"}
    assert locks(app) == []


# -- precedence --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_precedence_1_a_key_that_is_given_wins_over_every_strategy(app, strategy):
    task = task_of(app, strategy)

    first = task.apply_async(({"id": 1},), idempotency_key="my-custom-key-12345")
    again = task.apply_async(({"id": 1},), idempotency_key="my-custom-key-12345")
    other = task.apply_async(({"id": 1},), idempotency_key="my-custom-key-67890")

    assert again.id == first.id
    assert other.id != first.id
    with pytest.raises(IdempotencyKeyConflict):
        task.apply_async(({"id": 2},), idempotency_key="my-custom-key-12345")


def test_precedence_1_a_key_and_no_key_are_two_identities(app):
    pay = task_of(app, "strict")

    by_arguments = pay.delay({"id": 1})
    by_key = pay.apply_async(({"id": 1},), idempotency_key="k")

    assert by_key.id != by_arguments.id
    assert pay.delay({"id": 1}).id == by_arguments.id
    assert pay.apply_async(({"id": 1},), idempotency_key="k").id == by_key.id


@pytest.mark.parametrize("unique", [{}, {"unique": False}])
def test_precedence_1_a_key_makes_a_task_unique_that_is_not(app, unique):
    @app.task(name="plain", **unique)
    def plain(x: int) -> None: ...

    first = plain.apply_async((1,), idempotency_key="k")

    assert plain.apply_async((1,), idempotency_key="k").id == first.id
    assert plain.apply_async((1,), idempotency_key="k", unique=False).id == first.id
    assert plain.delay(1).outcome == "bypassed"


def test_precedence_2_without_a_key_the_tasks_strategy_decides(app):
    tasks = {strategy: task_of(app, strategy, strategy) for strategy in STRATEGIES}

    assert tasks["strict"].delay(1).id == tasks["strict"].delay(1).id
    assert tasks["always_unique"].delay(1).id != tasks["always_unique"].delay(1).id
    with pytest.raises(IdempotencyKeyRequired):
        tasks["caller_provided"].delay(1)


def test_precedence_2_the_call_goes_over_the_task(app):
    pay = task_of(app, "strict")
    first = pay.delay(1)

    assert pay.apply_async((1,), identity_strategy="always_unique").id != first.id
    with pytest.raises(IdempotencyKeyRequired):
        pay.apply_async((1,), identity_strategy="caller_provided")


def test_precedence_2_annotations_and_defaults_of_the_app_are_below_the_task():
    app = make_app(
        "memory://",
        task_annotations={"annotated": {"identity_strategy": "always_unique"}},
        unique_default_identity_strategy="caller_provided",
    )
    defaulted, annotated = task_of(app, None, "defaulted"), task_of(app, None, "annotated")
    strict = task_of(app, "strict", "strict")

    with pytest.raises(IdempotencyKeyRequired):
        defaulted.delay(1)
    assert annotated.delay(1).id != annotated.delay(1).id
    assert strict.delay(1).id == strict.delay(1).id


# -- "API Behavior" ----------------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", ["reject", "ignore"])
@pytest.mark.parametrize("key", [{}, {"idempotency_key": "guessed"}], ids=["strict", "key"])
def test_api_a_concealed_holder_cannot_be_probed_for(app_with, on_conflict, key):
    app = app_with(unique_conceal_holder=True)
    pay = task_of(app, "strict", unique_on_conflict=on_conflict)
    first = pay.apply_async((1,), **key)

    with pytest.raises(DuplicateTask) as caught:
        pay.apply_async((1,), **key)

    error = caught.value
    assert (error.task_id, error.state) == (None, None)
    assert first.id not in f"{error!s} {error!r} {error.to_ojs()} {error.args} {vars(error)}"


def test_api_a_missing_key_is_a_bad_request_that_says_what_to_do(app):
    with pytest.raises(IdempotencyKeyRequired, match="idempotency_key") as caught:
        task_of(app, "caller_provided").delay(1)

    assert caught.value.to_ojs()["error"] == {
        "code": "invalid_request",
        "message": str(caught.value),
        "retryable": False,
        "details": {"argument": "idempotency_key", "job_type": "shop.pay"},
    }


# -- "Recommended Patterns" --------------------------------------------------------------------

MOMENT = datetime(2026, 1, 20, 14, 7, 31, tzinfo=UTC)


def test_pattern_1_a_key_with_a_time_bucket(app):
    generate = task_of(app, "strict", "generate_report")

    def report(at: datetime) -> Any:
        key = f"generate_report-12345-{time_bucket('PT1H', at)}"
        return generate.apply_async(({"customer_id": 12345},), idempotency_key=key)

    first = report(MOMENT)

    assert report(MOMENT + timedelta(minutes=52)).id == first.id
    assert report(MOMENT + timedelta(minutes=53)).id != first.id


def test_pattern_2_time_among_the_arguments(app):
    reconcile = task_of(app, "strict", "daily_reconciliation")

    def run(day: str, window: str) -> Any:
        return reconcile.delay({"account_id": "ACC-001", "run_date": day, "run_window": window})

    first = run("2026-01-20", "morning")

    assert run("2026-01-20", "morning").id == first.id
    assert run("2026-01-20", "evening").id != first.id
    assert run("2026-01-21", "morning").id != first.id


@pytest.mark.parametrize(
    ("window", "period", "name", "last_moment"),
    [
        ("per minute", "PT1M", "job-2026-01-20T14:07", (2026, 1, 20, 14, 7)),
        ("per hour", "PT1H", "job-2026-01-20T14", (2026, 1, 20, 14, 59)),
        ("per day", "P1D", "job-2026-01-20", (2026, 1, 20, 23, 59)),
        ("per week", "P1W", "job-2026-W04", (2026, 1, 25, 23, 59)),
        ("per month", "P1M", "job-2026-01", (2026, 1, 31, 23, 59)),
    ],
)
def test_the_granularity_guide(app, window, period, name, last_moment):
    job = task_of(app, "strict", "job")
    last = datetime(*last_moment, 59, tzinfo=UTC)  # type: ignore[misc, arg-type]

    def call(at: datetime) -> Any:
        return job.apply_async((1,), idempotency_key=f"job-{time_bucket(period, at)}")

    first = call(MOMENT)

    assert f"job-{time_bucket(period, MOMENT)}" == name
    assert call(last).id == first.id
    assert call(last + timedelta(seconds=1)).id != first.id


# -- "Anti-Patterns" ---------------------------------------------------------------------------


def test_calls_that_are_far_apart_are_one_while_the_first_still_waits(app):
    pay = task_of(app, "strict")
    first = pay.delay({"customer_id": 123})

    advance(app, 3600)

    assert pay.delay({"customer_id": 123}).id == first.id


@pytest.mark.parametrize("strategy", ["caller_provided", "always_unique"])
def test_a_call_without_a_key_has_no_lock_to_look_up(app, strategy):
    task = task_of(app, strategy)

    with pytest.raises(InvalidPolicy, match="idempotency_key"):
        lookup(task, (1,))

    task.apply_async((1,), idempotency_key="k")
    assert lookup(task, idempotency_key="k") is not None
