"""``unique_enabled`` and ``unique_dry_run``: nothing is skipped, and what is held is released."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chord, group

from celery_unique import (
    StoreUnavailable,
    UniqueKeyError,
    apply_many,
    lookup,
    unique_conflict,
    unique_lost,
)
from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER
from celery_unique.operations.doctor.checks import switches
from tests.support.app import define, flush, locks, make_app, messages, value_of, working

STRATEGIES = ("ignore", "reject", "replace", "replace_except_schedule", "rerun")


def echo(shop_id: int) -> int:
    return shop_id


# -- the kill switch --------------------------------------------------------------------------


def test_a_disabled_app_publishes_every_call_plain(app_with: Callable[..., Celery]) -> None:
    app = app_with(unique_enabled=False)
    task = define(app, unique=True, unique_on_conflict="reject")

    results = [task.delay(7), task.delay(7), task.apply_async((7,), idempotency_key="order-7")]
    results += apply_many([task.s(7), task.s(7)])

    assert [result.outcome for result in results] == ["bypassed"] * 5
    assert {result.unique_key for result in results} == {None}
    assert {sent.id for sent in messages(app)} == {result.id for result in results}
    assert not any(HEADER in sent.headers for sent in messages(app))
    assert locks(app) == []


def test_a_disabled_app_makes_calls_whose_key_cannot_be_made(local_app: Celery) -> None:
    local_app.conf.unique_enabled = False
    task = define(local_app, unique=True, identity_strategy="caller_provided")

    assert task.delay(7).outcome == "bypassed"


def test_a_disabled_app_needs_no_store() -> None:
    app = make_app("redis://localhost:1/0", unique_enabled=False)

    assert define(app, unique=True).delay(7).outcome == "bypassed"
    assert len(messages(app)) == 1


def test_what_was_held_before_is_released_by_its_worker(app_with: Callable[..., Celery]) -> None:
    app = app_with()
    task = define(app, unique=True, function=echo)
    held = task.delay(7)
    flush(app)
    app.conf.unique_enabled = False
    beside = task.delay(7)

    with working(app):
        assert value_of(held) == value_of(beside) == 7

    assert (held.outcome, beside.outcome) == ("created", "bypassed")
    assert lookup(task, (7,)) is None


def test_a_retry_of_a_task_that_holds_its_key_continues_under_it(local_app: Celery) -> None:
    app = local_app

    @app.task(name="shop.retries", bind=True, unique=True)
    def retries(self: Any, shop_id: int) -> int:
        if not self.request.retries:
            app.conf.unique_enabled = False
            raise self.retry(countdown=0)
        assert self.request.unique is not None
        return shop_id

    with working(app):
        assert value_of(retries.delay(7)) == 7

    assert locks(app) == []


def test_switches_are_logged_once_and_found_by_the_doctor(caplog: Any) -> None:
    for setting in ("unique_enabled", "unique_dry_run"):
        app = make_app("memory://", **{setting: setting == "unique_dry_run"})
        caplog.clear()

        task = define(app, unique=True)
        task.delay(7)
        task.delay(7)

        lines = [each for each in caplog.records if setting in each.getMessage()]
        assert [each.levelno for each in lines] == [logging.WARNING]
        [finding] = switches(state_of(app).settings)
        assert setting in finding.message
    assert list(switches(state_of(make_app("memory://")).settings)) == []


# -- the dry run ------------------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", STRATEGIES)
def test_a_dry_run_reports_the_duplicate_and_publishes_it(
    app_with: Callable[..., Celery], on_conflict: str, caplog: Any
) -> None:
    app = app_with(unique_dry_run=True)
    task = define(app, unique=True, unique_on_conflict=on_conflict)
    conflicts: list[dict[str, Any]] = []
    caplog.set_level(logging.INFO, "celery_unique")

    def note(**facts: Any) -> None:
        conflicts.append(facts)

    unique_conflict.connect(note)
    first = task.delay(7)
    flush(app)
    again = task.delay(7)

    assert (first.outcome, again.outcome, again.deduplicated) == (
        "created",
        "would_deduplicate",
        False,
    )
    assert again.id != first.id
    assert again.unique_key == first.unique_key
    assert again.holder_state == "available"
    assert [sent.id for sent in messages(app)] == [first.id, again.id]
    assert [HEADER in sent.headers for sent in messages(app)] == [True, False]
    [fact] = conflicts
    assert (fact["task_id"], fact["on_conflict"], fact["dry_run"]) == (first.id, on_conflict, True)
    [line] = [each for each in caplog.records if getattr(each, "on_conflict", "")]
    assert line.outcome == "would_deduplicate"
    held = lookup(task, (7,))
    assert held is not None
    assert (held.task_id, held.duplicates) == (first.id, 1)


def test_both_tasks_of_a_dry_run_run_and_the_key_is_free(app_with: Callable[..., Celery]) -> None:
    app = app_with(unique_dry_run=True)
    task = define(app, unique=True, unique_on_conflict="replace", function=echo)
    lost: list[Any] = []

    def note(**facts: Any) -> None:
        lost.append(facts)

    unique_lost.connect(note)
    results = [task.delay(7) for _ in range(3)]

    with working(app):
        assert [value_of(result) for result in results] == [7, 7, 7]

    assert lookup(task, (7,)) is None
    assert lost == []


def test_canvases_and_batches_run_all_their_members_in_a_dry_run(
    app_with: Callable[..., Celery],
) -> None:
    app = app_with(unique_dry_run=True)
    task = define(app, unique=True, function=echo)

    @app.task(name="shop.total")
    def total(values: list[int]) -> int:
        return sum(values)

    counted = chord([task.s(7), task.s(7), task.s(7)], total.s()).delay()
    grouped = group(task.s(8), task.s(8)).delay()
    batch = apply_many([task.s(9), task.s(9)])

    with working(app):
        assert value_of(counted) == 21
        assert value_of(grouped) == [8, 8]
        assert [value_of(result) for result in batch] == [9, 9]
    assert [result.outcome for result in batch] == ["created", "would_deduplicate"]
    assert locks(app) == []


def test_a_retry_of_a_duplicate_in_a_dry_run_is_no_second_conflict(local_app: Celery) -> None:
    app = local_app
    app.conf.unique_dry_run = True
    conflicts: list[Any] = []

    def note(**facts: Any) -> None:
        conflicts.append(facts["task_id"])

    @app.task(name="shop.retries", bind=True, unique=True)
    def retries(self: Any, shop_id: int) -> int:
        if self.request.unique is None and not self.request.retries:
            raise self.retry(countdown=0)
        return shop_id

    unique_conflict.connect(note)
    holder = retries.apply_async((7,), countdown=3600)
    again = retries.delay(7)

    with working(app):
        assert value_of(again) == 7

    assert again.outcome == "would_deduplicate"
    assert conflicts == [holder.id]


def test_a_dry_run_never_raises(local_app: Celery, caplog: Any) -> None:
    app = local_app
    app.conf.unique_dry_run = True
    plain = define(app, unique=True)
    strict = define(app, "shop.pay", unique=True, identity_strategy="caller_provided")

    no_key = plain.delay(float("nan"))
    required = strict.delay(7)
    strict.apply_async((7,), idempotency_key="order-7")
    other_work = strict.apply_async((8,), idempotency_key="order-7")

    assert (no_key.outcome, required.outcome) == ("bypassed", "bypassed")
    assert other_work.outcome == "would_deduplicate"
    assert [sent.id for sent in messages(app)][:2] == [no_key.id, required.id]
    would = [each for each in caplog.records if getattr(each, "outcome", "") == "would_raise"]
    assert len(would) == 3
    app.conf.unique_dry_run = False
    with pytest.raises(UniqueKeyError):
        plain.delay(float("nan"))


def test_a_dry_run_publishes_while_the_store_is_down() -> None:
    app = make_app("redis://localhost:1/0", unique_dry_run=True, unique_store_timeout=0.2)
    task = define(app, unique=True)

    assert task.delay(7).outcome == "bypassed"
    assert [each.outcome for each in apply_many([task.s(7), task.s(8)])] == ["bypassed"] * 2
    assert len(messages(app)) == 3

    app.conf.unique_dry_run = False
    with pytest.raises(StoreUnavailable):
        task.delay(7)


@pytest.mark.server
def test_a_dry_run_in_one_act_pushes_the_duplicate(redis_url: str) -> None:
    app = make_app(broker=redis_url, backend=redis_url, unique_dry_run=True)
    task = define(app, unique=True, unique_on_conflict="replace", function=echo)

    results = [task.delay(7), task.delay(7), *apply_many([task.s(7)])]

    assert [r.outcome for r in results] == ["created", "would_deduplicate", "would_deduplicate"]
    with working(app):
        assert [value_of(result) for result in results] == [7, 7, 7]
    assert locks(app) == []


def test_eager_calls_run_in_a_dry_run_and_in_a_disabled_app(local_app: Celery) -> None:
    app = local_app
    app.conf.update(task_always_eager=True, unique_eager=True, unique_dry_run=True)
    task = define(app, unique=True, unique_states="window", unique_for=60, function=echo)

    outcomes = [task.delay(7).outcome, task.delay(7).outcome]
    app.conf.unique_enabled = False

    assert outcomes == ["created", "would_deduplicate"]
    assert (task.delay(7).outcome, task.delay(7).get()) == ("bypassed", 7)
