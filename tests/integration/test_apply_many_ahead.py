"""``apply_many`` on Redis asks for the next locks while it sends messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_unique import BatchInterrupted, StoreUnavailable, apply_many, lookup
from celery_unique.config.app_state import state_of
from celery_unique.publish import apply_many as batches
from tests.support import RedisServer, eventually
from tests.support.app import flush, locks, make_app, messages

pytestmark = pytest.mark.server

Wait = Callable[[], list[Any]]


@pytest.fixture
def app(redis_server: RedisServer) -> Iterator[Celery]:
    app = make_app(redis_server.fresh_url())
    yield app
    state_of(app).store.close()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TOGETHER", 3)


def task_of(app: Celery) -> Any:
    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    return rebuild


def around_asking(app: Celery, change: Callable[[int, Callable[[], Wait]], Wait]) -> None:
    """Let ``change`` stand in for the store's ``begin_acquire_many``, which it gets with the
    number of the question."""
    store: Any = state_of(app).store
    begin, asked = store.begin_acquire_many, []

    def begun(claims: Any, confirmed: Any) -> Any:
        asked.append(claims)
        return change(len(asked), lambda: begin(claims, confirmed))

    store.begin_acquire_many = begun


def around_waiting(app: Celery, change: Callable[[int, Wait], Wait]) -> None:
    """Let ``change`` stand in for what waits for the answers."""
    around_asking(app, lambda number, begin: change(number, begin()))


def test_the_next_locks_are_asked_for_before_messages_are_sent(app):
    rebuild, steps = task_of(app), []
    send = app.amqp.send_task_message

    def noting(number: int, wait: Wait) -> Wait:
        steps.append(f"ask {number}")

        def heard() -> list[Any]:
            steps.append(f"hear {number}")
            return wait()

        return heard

    def sent(*args: Any, **options: Any) -> Any:
        steps.append("send")
        return send(*args, **options)

    around_waiting(app, noting)
    app.amqp.send_task_message = sent

    apply_many(rebuild.s(number) for number in range(7))

    assert steps == [
        *("ask 1", "hear 1", "ask 2", "send", "send", "send"),
        *("hear 2", "ask 3", "send", "send", "send"),
        *("hear 3", "send"),
    ]
    flush(app)
    assert [lookup(rebuild, (number,)).state for number in range(7)] == ["available"] * 7


def test_results_are_made_once_and_are_those_that_the_caller_gets(app):
    rebuild, made = task_of(app), []
    make = rebuild.AsyncResult

    def noting(task_id: str) -> Any:
        made.append(make(task_id))
        return made[-1]

    rebuild.AsyncResult = noting

    results = apply_many(rebuild.s(number) for number in range(4))

    assert [id(result) for result in made] == [id(result) for result in results]
    assert [result.outcome for result in results] == ["created"] * 4


@pytest.mark.parametrize("policy", ["raise", "publish"])
def test_a_store_that_falls_silent_half_way(app, policy):
    app.conf.unique_on_store_error = policy
    rebuild = task_of(app)

    def silent_after_two(number: int, wait: Wait) -> Wait:
        def unheard() -> list[Any]:
            wait()
            raise StoreUnavailable("no answer")

        return unheard if number == 3 else wait

    around_waiting(app, silent_after_two)
    calls = [rebuild.s(number) for number in range(11)]

    if policy == "publish":
        outcomes = [result.outcome for result in apply_many(calls)]
        assert outcomes == ["created"] * 6 + ["bypassed"] * 5
        assert len(messages(app)) == 11
        return
    with pytest.raises(BatchInterrupted, match="6 of 11 calls were made") as caught:
        apply_many(calls)
    assert [result is not None for result in caught.value.results] == [True] * 6 + [False] * 5
    # The lock of none of the others stays, although the store had given it.
    eventually(lambda: len(locks(app)) == 6)
    assert len(messages(app)) == 6


def test_a_store_that_cannot_even_be_asked_hears_later_of_what_is_published(app):
    rebuild = task_of(app)

    def away(number: int, begin: Callable[[], Wait]) -> Wait:
        if number == 3:
            raise StoreUnavailable("it is away")
        return begin()

    around_asking(app, away)

    with pytest.raises(BatchInterrupted, match="6 of 8 calls were made"):
        apply_many(rebuild.s(number) for number in range(8))

    flush(app)
    assert [lookup(rebuild, (number,)).state for number in range(6)] == ["available"] * 6


def test_a_time_limit_while_the_answers_are_awaited_leaves_no_lock(app):
    rebuild = task_of(app)

    def interrupted(number: int, wait: Wait) -> Wait:
        def too_late() -> list[Any]:
            wait()
            raise SoftTimeLimitExceeded

        return too_late if number == 2 else wait

    around_waiting(app, interrupted)

    with pytest.raises(BatchInterrupted, match="3 of 5 calls were made"):
        apply_many(rebuild.s(number) for number in range(5))

    eventually(lambda: len(locks(app)) == 3)
    assert len(messages(app)) == 3


def test_a_broker_that_fails_while_locks_are_asked_for_leaves_none(app):
    rebuild, sent = task_of(app), []
    send = app.amqp.send_task_message

    def failing(*args: Any, **options: Any) -> Any:
        if len(sent) == 4:
            raise OSError("the broker is away")
        sent.append(1)
        return send(*args, **options)

    app.amqp.send_task_message = failing

    with pytest.raises(BatchInterrupted, match="4 of 12 calls were made"):
        apply_many(rebuild.s(number) for number in range(12))

    assert len(locks(app)) == 4  # at once, and not when their grace has passed
    assert len(messages(app)) == 4
