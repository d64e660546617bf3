"""``apply_many``: many calls, and what became of each."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task, chain, group
from kombu.exceptions import OperationalError

import celery_unique
from celery_unique import BatchInterrupted, DuplicateTask, StoreUnavailable, apply_many
from celery_unique.config.app_state import state_of
from celery_unique.publish import apply_many as batches
from tests.support.app import locks, make_app, messages, plain_app, value_of, working

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def rebuild(app: Celery) -> Any:
    return define(app)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH", 20)


def define(app: Celery) -> Any:
    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    @app.task(name="shop.echo")
    def echo(value: Any) -> Any:
        return value

    return rebuild


@contextmanager
def broker_that_fails_after(app: Celery, number: int) -> Iterator[None]:
    real = app.amqp.send_task_message
    sent = []

    def fail_in_the_end(*args: Any, **options: Any) -> Any:
        if len(sent) == number:
            raise OperationalError("the broker is away")
        sent.append(1)
        return real(*args, **options)

    app.amqp.send_task_message = fail_in_the_end
    try:
        yield
    finally:
        app.amqp.send_task_message = real


def test_every_call_gets_its_outcome(app, rebuild):
    held = rebuild.delay(1)
    echo = app.tasks["shop.echo"]

    results = apply_many([rebuild.s(1), rebuild.s(2), rebuild.s(2), echo.s(3), rebuild.s(4)])

    outcomes = [result.outcome for result in results]
    assert outcomes == ["deduplicated", "created", "deduplicated", "bypassed", "created"]
    assert results[0].id == held.id
    assert results[2].id == results[1].id
    assert [sent.id for sent in messages(app)] == [
        held.id,
        *(results[n].id for n in (1, 3, 4)),
    ]
    with working(app):
        assert [value_of(result) for result in results] == [1, 2, 2, 3, 4]


def test_more_calls_than_fit_in_a_batch(app, rebuild):
    results = apply_many(rebuild.s(number % 30) for number in range(60))

    assert [result.outcome for result in results] == ["created"] * 30 + ["deduplicated"] * 30
    assert [result.id for result in results[30:]] == [result.id for result in results[:30]]
    assert len(messages(app)) == 30


def test_locks_are_taken_in_few_round_trips(local_app):
    rebuild, store = define(local_app), state_of(local_app).store
    asked = []
    real = store.acquire_many

    def acquire_many(claims: Any) -> Any:
        asked.append(len(claims))
        return real(claims)

    store.acquire_many = acquire_many

    apply_many(rebuild.s(number) for number in range(45))

    assert asked == [20, 20, 5]


def test_nothing_is_nothing(local_app):
    assert apply_many([]) == []


def test_a_canvas_among_the_calls_is_applied_as_it_is(local_app):
    rebuild = define(local_app)
    echo = local_app.tasks["shop.echo"]

    with working(local_app):
        results = apply_many(
            [rebuild.s(1), chain(rebuild.si(1), echo.s()), group(rebuild.s(1), rebuild.s(2))]
        )

        assert value_of(results[0]) == 1
        assert value_of(results[1]) == 1
        assert results[2].get(timeout=10, interval=0.01) == [1, 2]


def test_calls_with_options_of_their_own(local_app):
    rebuild = define(local_app)
    mine = uuid.uuid4().hex

    results = apply_many(
        [
            rebuild.s(1).set(countdown=60),
            rebuild.s(1).set(task_id=mine),
            rebuild.s(1).set(unique=False),
            rebuild.s(2).set(idempotency_key="k"),
            local_app.signature("shop.rebuild", (2,)).set(idempotency_key="k"),
        ]
    )

    assert [result.outcome for result in results] == [
        "created",
        "joined",
        "bypassed",
        "created",
        "deduplicated",
    ]
    assert results[1].id == mine
    assert [sent.headers["eta"] is not None for sent in messages(local_app)] == [True, False, False]


def test_a_refused_call_is_an_error_in_its_place(local_app):
    rebuild = define(local_app)
    rejecting = rebuild.s(1).set(unique_on_conflict="reject")

    results = apply_many([rejecting, rejecting, rebuild.s(2)])

    assert isinstance(results[1], DuplicateTask)
    assert results[1].task_id == results[0].id
    assert [results[0].outcome, results[2].outcome] == ["created", "created"]


def test_a_newer_call_in_the_batch_replaces_an_older_one(local_app):
    rebuild = define(local_app)
    replacing = rebuild.s(1).set(unique_on_conflict="replace")

    first, second = apply_many([replacing, replacing])

    assert (first.outcome, second.outcome) == ("created", "replaced")
    with working(local_app):
        assert value_of(second) == 1
    assert local_app.AsyncResult(first.id).state == "REVOKED"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda task: task.s(1).set(unique_ttl=3),
        lambda task: task.s(1, 2, 3),
        lambda task: task.s(float("nan")),
        lambda task: task,
        lambda task: 7,
    ],
    ids=["option", "arguments", "key", "task", "number"],
)
def test_a_wrong_call_raises_before_anything_is_published(local_app, wrong):
    rebuild = define(local_app)

    with pytest.raises((TypeError, ValueError)):
        apply_many([rebuild.s(7), wrong(rebuild)])

    assert messages(local_app) == []
    assert locks(local_app) == []


def test_an_app_that_does_not_know_the_library_is_an_error(local_app):
    stranger = plain_app()

    @stranger.task(name="shop.echo")
    def echo(value: Any) -> Any: ...

    with pytest.raises(celery_unique.ConfigurationError, match="install"):
        apply_many([define(local_app).s(1), echo.s(1)])

    assert messages(local_app) == []


def test_two_apps_have_each_their_own_batch(local_app):
    other = make_app("memory://")
    here, there = define(local_app), define(other)

    results = apply_many([here.s(1), there.s(1), here.s(1)])

    assert [result.outcome for result in results] == ["created", "created", "deduplicated"]
    assert [len(messages(local_app)), len(messages(other))] == [1, 1]


@pytest.mark.parametrize("made", [1, 3, 25])
def test_a_broker_that_fails_half_way_leaves_no_lock_without_a_message(app, rebuild, made):
    calls = [rebuild.s(number) for number in range(30)]

    with broker_that_fails_after(app, made), pytest.raises(BatchInterrupted) as caught:
        apply_many(calls)

    error = caught.value
    assert f"{made} of 30 calls were made" in str(error)
    assert isinstance(error.__cause__, OperationalError)
    assert len(messages(app)) == made == len(locks(app))
    assert [result.id for result in error.results[:made]] == [sent.id for sent in messages(app)]
    assert error.results[made:] == [None] * (30 - made)
    assert pickle.loads(pickle.dumps(error)).results[made:] == error.results[made:]

    again = apply_many(calls)
    assert [result.outcome for result in again] == ["deduplicated"] * made + ["created"] * (
        30 - made
    )


def test_a_duplicate_of_a_call_that_was_not_made_is_not_made(local_app):
    rebuild = define(local_app)
    follower = rebuild.s(2).set(task_id=uuid.uuid4().hex)

    with broker_that_fails_after(local_app, 1), pytest.raises(BatchInterrupted) as caught:
        apply_many([rebuild.s(1), rebuild.s(2), rebuild.s(2), follower])

    assert [result is not None for result in caught.value.results] == [True, False, False, False]
    assert len(locks(local_app)) == 1
    assert state_of(local_app).store.due() == []


def test_a_store_that_does_not_answer_is_an_error_and_nothing_is_published():
    app = make_app(NOWHERE)
    rebuild = define(app)

    with pytest.raises(StoreUnavailable):
        apply_many([rebuild.s(1), rebuild.s(2)])

    assert messages(app) == []


def test_a_broker_that_takes_no_call_at_all_is_its_own_error_and_leaves_no_lock(local_app):
    rebuild = define(local_app)

    with broker_that_fails_after(local_app, 0), pytest.raises(OperationalError):
        apply_many([rebuild.s(1), rebuild.s(2)])

    assert locks(local_app) == []


def test_by_setting_calls_are_published_without_the_store():
    app = make_app(NOWHERE, unique_on_store_error="publish")
    rebuild = define(app)

    results = apply_many([rebuild.s(1), rebuild.s(1), app.tasks["shop.echo"].s(2)])

    assert [result.outcome for result in results] == ["bypassed"] * 3
    assert [sent.id for sent in messages(app)] == [result.id for result in results]


def test_eager_calls_are_carried_out(local_app):
    local_app.conf.task_always_eager = True

    rebuild = define(local_app)

    results = apply_many([rebuild.s(1), rebuild.s(2)])

    assert [result.get() for result in results] == [1, 2]


def test_a_class_that_changes_its_calls_is_asked(local_app):
    class Tagged(Task):
        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **{**options, "headers": {"tag": "mine"}})

    @local_app.task(name="shop.tagged", base=Tagged, unique=True)
    def tagged(shop_id: int) -> None: ...

    apply_many([tagged.s(1), tagged.s(2)])

    assert [sent.headers["tag"] for sent in messages(local_app)] == ["mine", "mine"]


def test_results_are_told_to_the_task_that_calls(local_app):
    rebuild = define(local_app)

    @local_app.task(name="shop.all")
    def rebuild_all() -> list[str]:
        return [result.id for result in apply_many([rebuild.s(1), rebuild.s(1), rebuild.s(2)])]

    with working(local_app):
        result = rebuild_all.delay()
        ids = value_of(result)

    assert [child.id for child in result.children] == [ids[0], ids[2], ids[1]]
