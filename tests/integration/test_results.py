"""What a caller can ask of the result of a call."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

import celery_unique
from celery_unique import DuplicateTask, UniqueResult, lookup
from tests.support import eventually
from tests.support.app import flush, make_app, messages, plain_app, value_of, working


@pytest.fixture
def rebuild(local_app: Celery) -> Any:
    @local_app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    return rebuild


def facts(result: UniqueResult) -> tuple[Any, ...]:
    return result.id, result.outcome, result.deduplicated, result.unique_key, result.holder_state


def test_the_result_of_a_created_task(rebuild):
    result = rebuild.delay(7)

    key = lookup(rebuild, (7,)).key
    assert facts(result) == (result.id, "created", False, key, None)


def test_the_result_of_a_duplicate(rebuild):
    first = rebuild.apply_async((7,), countdown=60)
    flush(rebuild.app)

    again = rebuild.delay(7)

    assert facts(again) == (first.id, "deduplicated", True, first.unique_key, "scheduled")


def test_a_result_that_was_made_from_an_id_knows_nothing_of_a_call(rebuild):
    result = rebuild.AsyncResult("some-id")

    assert facts(result) == ("some-id", "bypassed", False, None, None)


def test_the_result_of_a_duplicate_gets_what_the_holder_returns(rebuild):
    rebuild.delay(7)
    again = rebuild.delay(7)

    with working(rebuild.app):
        assert value_of(again) == 7


@pytest.mark.parametrize("twin_of", [lambda r: pickle.loads(pickle.dumps(r)), copy.copy])
def test_a_copied_or_pickled_result_tells_the_same(rebuild, twin_of):
    rebuild.delay(7)
    again = rebuild.delay(7)

    twin = twin_of(again)

    assert isinstance(twin, UniqueResult)
    assert facts(twin) == facts(again)
    assert twin == again


def test_a_rejection_pickles_with_all_its_facts(rebuild):
    rebuild.delay(7)
    with pytest.raises(DuplicateTask) as rejected:
        rebuild.apply_async((7,), unique_on_conflict="reject")

    twin = pickle.loads(pickle.dumps(rejected.value))

    assert (str(twin), vars(twin)) == (str(rejected.value), vars(rejected.value))
    assert twin.to_ojs() == rejected.value.to_ojs()


def test_the_key_is_in_no_message_and_in_no_log(rebuild, caplog):
    with caplog.at_level(logging.INFO):
        result = rebuild.delay(7)
        with pytest.raises(DuplicateTask) as rejected:
            rebuild.apply_async((7,), unique_on_conflict="reject")

    digest = result.unique_key.partition(":")[2]
    assert digest not in f"{rejected.value} {rejected.value!r} {result} {result!r} {caplog.text}"


@pytest.fixture
def subscribed(redis_url: str) -> Any:
    """An app with results in Redis, one of its tasks, and whether it is subscribed to an id."""
    app = make_app("memory://", result_backend=redis_url)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    def is_subscribed(task_id: str) -> bool:
        key = app.backend.get_key_for_task(task_id)
        return key in app.backend.result_consumer.subscribed_to

    yield rebuild, is_subscribed
    app.backend.result_consumer.stop()


@pytest.mark.server
def test_the_end_of_a_duplicates_result_cuts_off_no_other_result_of_its_id(subscribed):
    rebuild, is_subscribed = subscribed
    first = rebuild.delay(7)
    assert is_subscribed(first.id)

    again = rebuild.delay(7)
    assert again.id == first.id
    del again

    assert is_subscribed(first.id)


WAYS_TO_WAIT: dict[str, Callable[[Any], Any]] = {
    "then": lambda result: result.then(str, weak=True),
    "backend": lambda result: result.backend.add_pending_result(result, weak=True),
    "backend, several": lambda result: result.backend.add_pending_results([result], weak=True),
}


@pytest.mark.server
@pytest.mark.parametrize("wait", WAYS_TO_WAIT.values(), ids=WAYS_TO_WAIT)
def test_a_duplicate_that_was_waited_for_ends_its_subscription(subscribed, wait):
    rebuild, is_subscribed = subscribed
    first, again = rebuild.delay(7), rebuild.delay(7)
    task_id = first.id
    del first
    assert not is_subscribed(task_id)

    wait(again)
    assert is_subscribed(task_id)
    del again

    assert not is_subscribed(task_id)


@pytest.mark.server
def test_a_duplicate_whose_result_came_leaves_no_subscription(subscribed):
    rebuild, is_subscribed = subscribed
    first, again = rebuild.delay(7), rebuild.delay(7)
    task_id = first.id
    del first

    with working(rebuild.app):
        assert value_of(again) == 7
    del again

    assert not is_subscribed(task_id)


def test_a_result_class_with_an_end_of_its_own_has_it_for_duplicates_too():
    ended = []

    class OwnResult(AsyncResult):
        def __del__(self) -> None:
            ended.append(self.id)
            super().__del__()

    app = plain_app()
    app.AsyncResult = type("AsyncResult", (OwnResult,), {"app": app})
    celery_unique.install(app, store_url="memory://")

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    first, again = rebuild.delay(7), rebuild.delay(7)
    assert (again.outcome, ended) == ("deduplicated", [])
    del again

    assert ended == [first.id]


def test_revoking_the_result_of_a_duplicate_revokes_the_holder_and_says_so(rebuild, caplog):
    first = rebuild.delay(7)
    again = rebuild.delay(7)

    again.revoke()

    assert first.id in caplog.text
    assert "share" in caplog.text
    assert rebuild.delay(7).outcome == "created"


def test_with_concealed_holders_a_duplicate_is_told_nothing_of_them():
    app = make_app("memory://", unique_conceal_holder=True)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    first = rebuild.delay(7)

    with pytest.raises(DuplicateTask) as rejected:
        rebuild.delay(7)

    assert (rejected.value.task_id, rejected.value.state) == (None, None)
    assert first.id not in str(rejected.value)
    assert len(messages(app)) == 1


def test_a_duplicate_with_a_callback_is_still_rejected_where_that_is_asked(rebuild):
    rebuild.delay(7)

    with pytest.raises(DuplicateTask):
        rebuild.apply_async((7,), link=rebuild.si(8), unique_on_conflict="reject")

    assert len(messages(rebuild.app)) == 1


def test_every_duplicate_gets_its_result_by_rpc():
    app = make_app("memory://", result_backend="rpc://")

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    results = [rebuild.delay(7) for _ in range(3)]

    assert [result.outcome for result in results] == ["created", "joined", "joined"]
    assert len({result.id for result in results}) == 3
    with working(app):
        assert [value_of(result) for result in results] == [7, 7, 7]


def test_a_duplicate_of_an_ended_task_is_told_that_its_result_by_rpc_is_gone(caplog):
    app = make_app("memory://", result_backend="rpc://")

    @app.task(name="shop.rebuild", unique=True, unique_states="until_success")
    def rebuild(shop_id: int) -> int:
        return shop_id

    first = rebuild.delay(7)
    with working(app):
        assert value_of(first) == 7
        eventually(lambda: lookup(rebuild, (7,)).state == "completed")

    again = rebuild.delay(7)

    assert (again.outcome, again.deduplicated, again.id) == ("deduplicated", True, first.id)
    assert "rpc://" in caplog.text
    assert "shop.rebuild" in caplog.text


def test_a_duplicate_that_wants_no_result_is_told_nothing_of_rpc(caplog):
    app = make_app("memory://", result_backend="rpc://")

    @app.task(name="shop.rebuild", unique=True, ignore_result=True)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(7)
    rebuild.delay(7)

    assert "rpc://" not in caplog.text
