"""``merge`` through the public API, on every store: one run that gets the values of all calls."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from celery import Celery, chord, group
from kombu.exceptions import OperationalError

from celery_unique import (
    DuplicateTask,
    InvalidPolicy,
    StoreUnavailable,
    UniqueKeyError,
    UniquePolicy,
    apply_many,
    lookup,
    release,
    unique_lost,
)
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError
from celery_unique.followers.promote import reap_orphans
from celery_unique.operations.explain import explain_call
from celery_unique.publish.stale_holders.healing import Healed, StaleHolders
from celery_unique.publish.store_client import CallerStoreClient
from celery_unique.stores.base import Acquired, Claim, Finish, Start
from celery_unique.stores.record import State
from celery_unique.testing import assert_merged, locks_in_memory
from tests.integration.test_publish_failures import raising, replace_publish
from tests.support import eventually
from tests.support.app import (
    advance,
    define,
    flush,
    locks,
    make_app,
    messages,
    take_messages,
    value_of,
    working,
)


class Index:
    """A task that collects document ids, and a body that waits for the test's word."""

    def __init__(self, app: Celery, *, waits: bool = False, **options: Any) -> None:
        self.app = app
        self.ran: list[tuple[str, list[Any]]] = []
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.retries = False
        if not waits:
            self.may_end.set()

        @app.task(
            name="shop.index",
            bind=True,
            unique=True,
            unique_on_conflict="merge",
            unique_merge="doc_ids",
            **options,
        )
        def index(task: Any, shop: int, doc_ids: list[Any], full: bool = False) -> list[Any]:
            self.ran.append((task.request.id, doc_ids))
            if self.retries and task.request.retries == 0:
                raise task.retry(countdown=0)
            self.began.set()
            assert self.may_end.wait(20)
            return doc_ids

        self.task = index

    def call(self, *doc_ids: Any, shop: int = 7, **options: Any) -> Any:
        result = self.task.apply_async((shop, list(doc_ids)), **options)
        flush(self.app)
        return result


# -- what a call gets ------------------------------------------------------------------


def test_calls_are_merged_into_the_task_that_waits_and_it_runs_once_with_all_values(app):
    index = Index(app)

    first, second, third = index.call(1, 2), index.call(3), index.task.delay(7, doc_ids=[4])
    other = index.call(9, shop=8)

    assert [r.outcome for r in (first, second, third)] == ["created", "merged", "merged"]
    assert [r.deduplicated for r in (first, second, third)] == [False, True, True]
    assert first.id == second.id == third.id
    assert second.holder_state == "available"
    assert pickle.loads(pickle.dumps(second)).outcome == "merged"
    assert (other.outcome, other.unique_key != first.unique_key) == ("created", True)
    assert [sent.id for sent in messages(app)] == [first.id, other.id]
    with working(app):
        assert value_of(second) == [1, 2, 3, 4]
        assert value_of(other) == [9]
    assert index.ran == [(first.id, [1, 2, 3, 4]), (other.id, [9])]
    assert locks(app) == []


def test_calls_during_a_run_become_one_successor(app):
    index = Index(app, waits=True)
    first = index.call(1)
    with working(app, concurrency=2, pool="threads"):
        assert index.began.wait(20)

        second, third = index.call(2), index.call(3)

        assert (second.outcome, second.deduplicated, second.holder_state) == (
            *("rerun", False),
            "active",
        )
        assert (third.outcome, third.id) == ("merged", second.id)
        index.may_end.set()
        assert value_of(first) == [1]
        assert value_of(third) == [2, 3]
    assert [values for _, values in index.ran] == [[1], [2, 3]]


def test_a_retry_runs_with_the_same_values(app):
    index = Index(app)
    index.retries = True
    first = index.call(1)
    index.call(2)

    with working(app):
        assert value_of(first) == [1, 2]

    assert index.ran == [(first.id, [1, 2])] * 2


def test_values_that_json_carries_in_a_form_of_its_own_arrive_as_in_a_message(app):
    index = Index(app)
    moment = datetime(2026, 11, 18, tzinfo=UTC)

    first = index.call(moment, "größe\n\0")
    index.call({"a": [None, 1.5]}, moment)

    with working(app):
        value_of(first)
    assert [values for _, values in index.ran] == [
        [moment, "größe\n\0", {"a": [None, 1.5]}, moment]
    ]


def test_several_parameters_are_merged_each_by_itself(app):
    @app.task(
        unique=True, unique_on_conflict="merge", unique_merge=["added", "removed"], shared=False
    )
    def update(shop: int, added: list[int], /, *, removed: Any = ()) -> Any:
        return [added, list(removed)]

    first = update.delay(7, [1])
    update.delay(7, [2], removed=[3])
    update.delay(7, [], removed=(4, 5))

    with working(app):
        assert value_of(first) == [[1, 2], [3, 4, 5]]


def test_a_parameter_that_is_not_given_adds_no_values(app):
    @app.task(unique=True, unique_on_conflict="merge", unique_merge="ids", shared=False)
    def update(shop: int, ids: Any = None, **more: Any) -> Any:
        return ids

    first = update.delay(7)
    update.delay(7, [1])
    update.delay(shop=7)
    update.delay(7, ids=[2])

    with working(app):
        assert value_of(first) == [1, 2]


@pytest.mark.parametrize("default", [None, ("all",), []])
def test_a_parameter_that_no_call_gives_keeps_its_default(app, default):
    seen = []

    @app.task(unique=True, unique_on_conflict="merge", unique_merge="ids", shared=False)
    def update(shop: int, ids: Any = default) -> None:
        seen.append(ids)

    alone, first = update.delay(7), update.delay(8)
    assert update.delay(8).outcome == "merged"

    with working(app):
        value_of(alone)
        value_of(first)

    assert seen == [default, default]
    assert [type(ids) for ids in seen] == [type(default)] * 2


def test_a_call_without_its_list_adds_the_default_to_the_lists_of_others(app):
    @app.task(unique=True, unique_on_conflict="merge", unique_merge="ids", shared=False)
    def update(shop: int, ids: Any = ("all",)) -> Any:
        return ids

    first = update.delay(7)
    update.delay(7, ["a"])

    with working(app):
        assert value_of(first) == ["all", "a"]


def test_the_merged_parameter_is_no_part_of_the_key_and_the_others_are(app):
    index = Index(app)

    first, other = index.call(1), index.task.apply_async((7, [2]), {"full": True})

    assert first.unique_key != other.unique_key
    assert lookup(index.task, (7, ["whatever"])).task_id == first.id


def test_a_call_by_name_of_a_sender_without_the_code_is_merged(app):
    options = {
        "unique": True,
        "unique_on_conflict": "merge",
        "unique_merge": "doc_ids",
    }

    first = app.send_task("elsewhere.index", kwargs={"shop": 7, "doc_ids": [1]}, **options)
    second = app.send_task("elsewhere.index", kwargs={"shop": 7, "doc_ids": [2]}, **options)

    assert (second.outcome, second.id) == ("merged", first.id)
    with pytest.raises(UniqueKeyError, match="keyword"):
        app.send_task("elsewhere.index", args=(7, [3]), **options)


def test_a_payload_that_would_be_too_long_is_that_of_a_successor(app):
    index = Index(app, unique_merge_max_bytes=60)

    first, second = index.call(*range(10)), index.call(*range(10))
    third, fourth = index.call(*range(10)), index.call(5)

    assert [r.outcome for r in (first, second, third, fourth)] == [
        *("created", "rerun", "rerun"),
        "merged",
    ]
    assert fourth.id == third.id
    with working(app):
        assert value_of(third) == [*range(10), 5]
    assert [values for _, values in index.ran] == [[*range(10)], [*range(10)], [*range(10), 5]]


def test_a_call_from_the_body_of_the_task_becomes_its_successor(app):
    ran: list[list[int]] = []

    @app.task(unique=True, unique_on_conflict="merge", unique_merge="left", shared=False)
    def work(left: list[int]) -> None:
        ran.append(left)
        if len(left) > 1:
            for number in left[1:]:
                work.delay([number])

    work.delay([1, 2, 3])

    with working(app):
        eventually(lambda: len(ran) == 3 and not locks(app))
    assert ran == [[1, 2, 3], [2, 3], [3]]


# -- debounce ---------------------------------------------------------------------------


def test_with_a_countdown_calls_postpone_the_one_message_up_to_the_longest_wait(app):
    index = Index(app, unique_max_wait=60)

    first = index.call(1, countdown=30)
    advance(app, 20)
    second = index.call(2, countdown=30)
    lock = lookup(index.task, (7, []))
    advance(app, 25)
    third = index.call(3, countdown=30)
    bounded = lookup(index.task, (7, []))

    assert (second.outcome, third.outcome) == ("merged", "merged")
    assert len(messages(app)) == 1
    assert (lock.eta - lock.created_at).total_seconds() == pytest.approx(50, abs=5)
    assert (bounded.eta - lock.created_at).total_seconds() == pytest.approx(60, abs=5)
    assert bounded.duplicates == 2
    assert third.id == first.id


def test_a_postponed_message_is_held_back_until_its_time(app):
    index = Index(app)
    first = index.call(1, countdown=2)
    postponed_at = time.monotonic()
    assert index.call(2, countdown=4).outcome == "merged"
    with working(app):
        assert value_of(first) == [1, 2]
    assert len(index.ran) == 1
    assert time.monotonic() - postponed_at >= 4


# -- bad input ----------------------------------------------------------------------------

NO_LISTS: list[Any] = [5, "abc", None, {"a": 1}, {1, 2}, b"abc", iter([1]), 1.5, True]


@pytest.mark.parametrize("value", NO_LISTS)
def test_a_value_that_is_no_list_is_an_error_of_the_call(local_app, value):
    index = Index(local_app)

    with pytest.raises(UniqueKeyError, match=r"'doc_ids'.*list") as caught:
        index.task.delay(7, value)

    assert caught.value.argument == "doc_ids"
    assert (messages(local_app), locks(local_app)) == ([], [])


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), {1}, lambda: 0])
def test_a_list_that_json_cannot_carry_is_an_error_of_the_call(local_app, value):
    index = Index(local_app)

    with pytest.raises(UniqueKeyError, match=r"'doc_ids'.*JSON") as caught:
        index.task.delay(7, [1, value])

    assert caught.value.argument == "doc_ids"
    assert (messages(local_app), locks(local_app)) == ([], [])


def takes_list(shop: int, doc_ids: list[int]) -> None: ...


def takes_number(shop: int, doc_ids: int) -> None: ...


def takes_text(shop: int, doc_ids="abc") -> None: ...


def takes_many(shop: int, *doc_ids: int) -> None: ...


def takes_mapping(shop: int, doc_ids: dict[str, int]) -> None: ...


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str, str]] = [
    (takes_list, {}, "merge", "unique_merge"),
    (takes_list, {"unique_merge": "doc_id"}, "merge", "doc_ids"),
    (takes_list, {"unique_merge": []}, "merge", "empty"),
    (takes_list, {"unique_merge": ["doc_ids", "doc_ids"]}, "merge", "repeated"),
    (takes_list, {"unique_merge": 5}, "merge", "list of names"),
    (takes_number, {"unique_merge": "doc_ids"}, "merge", "takes no list"),
    (takes_text, {"unique_merge": "doc_ids"}, "merge", "takes no list"),
    (takes_many, {"unique_merge": "doc_ids"}, "merge", "takes no list"),
    (takes_mapping, {"unique_merge": "doc_ids"}, "merge", "takes no list"),
    *(
        (
            takes_list,
            {"unique_merge": "doc_ids", "unique_merge_max_bytes": wrong},
            "merge_max_bytes",
            "bytes",
        )
        for wrong in (0, -1, "1 MB", 1.5, True)
    ),
    (takes_list, {"unique_merge": "doc_ids", "unique_on": "doc_ids"}, "merge", "one key"),
    (takes_list, {"unique_merge": "doc_ids", "unique_key": "{doc_ids}"}, "merge", "one key"),
    (
        takes_list,
        {"unique_merge": "doc_ids", "unique_states": "window"},
        "on_conflict",
        "countdown",
    ),
    (
        takes_list,
        {"unique_merge": "doc_ids", "unique_on_conflict": "ignore"},
        "merge",
        "'merge' and not 'ignore'",
    ),
    (
        takes_list,
        {"unique_merge_max_bytes": 10, "unique_on_conflict": "rerun"},
        "merge_max_bytes",
        "'merge' and not 'rerun'",
    ),
]


@pytest.mark.parametrize(("function", "options", "field", "text"), WRONG)
def test_a_wrong_policy_is_an_error_where_the_task_is_defined(
    local_app, function, options, field, text
):
    with pytest.raises(InvalidPolicy, match=text) as caught:
        define(
            local_app,
            function=function,
            unique=True,
            **{"unique_on_conflict": "merge", **options},
        )

    assert caught.value.field == field


@pytest.mark.parametrize(("function", "options", "field", "text"), WRONG)
def test_a_wrong_policy_of_a_call_is_an_error_of_the_call(
    local_app, function, options, field, text
):
    task = define(local_app, function=function, unique=True)

    with pytest.raises(InvalidPolicy, match=text) as caught:
        task.apply_async((7, [1]), **{"unique_on_conflict": "merge", **options})

    assert caught.value.field == field


def test_a_call_can_be_merged_by_its_own_options(app):
    task = define(app, function=takes_list, unique=True)
    options = {"unique_on_conflict": "merge", "unique_merge": ["doc_ids"]}

    first = task.apply_async((7, [1]), unique_merge_max_bytes=1000, **options)
    second = task.apply_async((7, [2]), unique_merge_max_bytes=1000, **options)

    assert (second.outcome, second.id) == ("merged", first.id)


def test_a_policy_that_merges_is_no_document_of_the_open_job_spec():
    policy = UniquePolicy(on_conflict="merge", merge="doc_ids", merge_max_bytes=10)

    with pytest.raises(InvalidPolicy):
        policy.to_ojs()
    assert UniquePolicy(**policy.as_fields()) == policy == pickle.loads(pickle.dumps(policy))
    with pytest.raises(InvalidPolicy, match="unique_on_conflict='merge'"):
        UniquePolicy.from_ojs({"keys": ["type"], "on_conflict": "merge"})


def test_an_app_wide_bound_is_for_the_tasks_that_merge():
    app = make_app("memory://", unique_default_merge_max_bytes=50)
    index = Index(app)
    plain = define(app, unique=True)

    first, second = index.call(*range(10)), index.call(*range(10))

    assert (first.outcome, second.outcome) == ("created", "rerun")
    assert plain.delay(1).outcome == "created"


def test_no_app_merges_by_default():
    app = make_app("memory://", unique_default_on_conflict="merge")

    with pytest.raises(ConfigurationError, match="unique_merge"):
        define(app, unique=True).delay(1)


def test_a_concealed_holder_cannot_be_merged_into():
    app = make_app("memory://", unique_conceal_holder=True)
    index = Index(app)

    with pytest.raises(InvalidPolicy, match="unique_conceal_holder"):
        index.call(1)


def test_a_call_with_the_id_of_a_running_task_is_refused(app):
    index = Index(app, waits=True)
    first = index.call(1)
    with working(app, concurrency=2, pool="threads"):
        assert index.began.wait(20)

        with pytest.raises(DuplicateTask, match="takes no more values"):
            index.call(2, task_id=first.id)

        index.may_end.set()
        assert value_of(first) == [1]


def test_an_idempotency_key_is_not_merged(app):
    index = Index(app)

    first = index.call(1, idempotency_key="k")
    again = index.call(1, idempotency_key="k")

    assert (again.outcome, again.id) == ("deduplicated", first.id)
    assert index.call(2).outcome == "created"


# -- canvas, batches, eager calls -----------------------------------------------------------


def test_members_of_a_chord_are_merged_and_share_the_outcome(app):
    index = Index(app)
    totals: list[Any] = []

    @app.task(name="shop.total", shared=False)
    def total(results: list[Any]) -> None:
        totals.append(results)

    chord(group(index.task.s(7, [n]) for n in range(4)), total.s()).delay()

    with working(app):
        eventually(lambda: totals)
    assert totals == [[[0, 1, 2, 3]] * 4]
    assert [values for _, values in index.ran] == [[0, 1, 2, 3]]


def test_a_chain_goes_on_with_the_outcome_of_all_values(app):
    index = Index(app)
    seen: list[Any] = []

    @app.task(name="shop.after", shared=False)
    def after(result: list[int]) -> None:
        seen.append(result)

    index.call(1)
    (index.task.s(7, [2]) | after.s()).delay()

    with working(app):
        eventually(lambda: seen)
    assert seen == [[1, 2]]


def test_a_batch_merges_its_calls_in_their_order(app):
    index, plain = Index(app), define(app, unique=True)

    results = apply_many(
        [index.task.s(7, [1]), plain.s(1), index.task.s(7, [2]), plain.s(1), index.task.s(7, [3])]
    )

    outcomes = ["created", "created", "merged", "deduplicated", "merged"]
    assert [result.outcome for result in results] == outcomes
    with working(app):
        assert value_of(results[0]) == [1, 2, 3]


def test_an_eager_call_runs_with_its_own_values():
    app = make_app("memory://", task_always_eager=True, unique_eager=True)
    index = Index(app)

    first, second = index.call(1), index.call(2)

    assert (first.outcome, second.outcome) == ("created", "created")
    assert [values for _, values in index.ran] == [[1], [2]]
    assert locks(app) == []


def test_an_eager_call_is_not_merged_into_a_task_that_waits():
    app = make_app("memory://", unique_eager=True)
    index = Index(app)
    first = index.call(1)

    with pytest.raises(DuplicateTask):
        index.task.apply((7, [2]))

    with working(app):
        assert value_of(first) == [1]


# -- failures -----------------------------------------------------------------------------


def test_a_publish_that_fails_leaves_nothing(app):
    index = Index(app)
    replace_publish(app, raising(OperationalError("no broker")))

    with pytest.raises(OperationalError):
        index.call(1)

    assert locks(app) == []
    first = index.call(2)
    with working(app):
        assert value_of(first) == [2]


def test_a_call_that_meets_an_unpublished_task_publishes_it_with_the_values_of_both(app):
    """Its caller died between the acquire and the publish."""
    index = Index(app)

    def die(*args: Any, **options: Any) -> Any:
        raise SystemExit

    publish = app.amqp.send_task_message
    app.amqp.send_task_message = die
    original = CallerStoreClient.withdraw
    CallerStoreClient.withdraw = lambda *_: None  # type: ignore[method-assign]
    try:
        with pytest.raises(SystemExit):
            index.call(1)
    finally:
        CallerStoreClient.withdraw = original  # type: ignore[method-assign]
        app.amqp.send_task_message = publish

    second = index.call(2)

    assert second.outcome == "merged"
    assert [sent.id for sent in messages(app)] == [second.id]
    with working(app):
        assert value_of(second) == [1, 2]


def test_values_that_have_run_while_their_caller_waited_for_the_publish_run_once(
    local_app, monkeypatch
):
    """A fast task starts and ends before its own caller has confirmed it."""
    index, store = Index(local_app), state_of(local_app).store
    key = index.call(0, shop=7).unique_key
    store.release(key, None)
    acquire, ran_with = store.acquire, []
    values = {"merge": '{"doc_ids":[1]}', "merge_max_bytes": 1000}
    acquire(key, Claim("first", "shop.index", "pswrt", 30_000, "merge", **values))

    def acquire_and_run(key: str, claim: Claim) -> Acquired:
        reply = acquire(key, claim)
        if not ran_with:
            start = Start("first", "d1", "shop.index", 60_000, 60_000, merge=True)
            lines = store.start(key, start).payload.splitlines()
            ran_with.extend(json.loads(line)[1]["doc_ids"] for line in lines)
            store.finish(key, Finish("first", "d1", State.COMPLETED, 0, 0, merge=True))
        return reply

    monkeypatch.setattr(store, "acquire", acquire_and_run)
    second = index.call(2)

    assert ran_with == [[1], [2]]
    assert (second.id, second.outcome) == ("first", "merged")


def values_of(payload: str) -> list[Any]:
    return [json.loads(line)[1]["doc_ids"] for line in payload.splitlines()]


def test_a_follower_of_a_task_whose_worker_died_runs_with_all_values_again(local_app):
    index, store = Index(local_app), state_of(local_app).store
    seen: list[Any] = []

    @local_app.task(name="shop.after", shared=False)
    def after(result: list[int]) -> None:
        seen.append(result)

    first = index.call(1)
    (index.task.s(7, [2]) | after.s()).delay()
    take_messages(local_app)
    dead = store.start(
        first.unique_key, Start(first.id, "d1", "shop.index", 60_000, 60_000, merge=True)
    )
    assert values_of(dead.payload) == [[1], [2]]

    advance(local_app, 61)  # and nobody renews its lease
    assert reap_orphans(state_of(local_app), first.unique_key)

    with working(local_app):
        eventually(lambda: seen)
    assert seen == [[1, 2]]


@pytest.mark.parametrize("until", ["it runs", "it has ended"])
def test_values_of_a_call_run_once_if_the_task_starts_while_it_is_checked(app, monkeypatch, until):
    """It has waited so long that the call checks whether its message is lost, and just then a
    worker starts it."""
    index, store = Index(app), state_of(app).store
    first = index.call(1)
    advance(app, 61)
    heal, ran = StaleHolders.heal, []

    def run_and_heal(self: StaleHolders, key: str, task_id: str) -> Any:
        start = Start(task_id, "d1", "shop.index", 60_000, 60_000, merge=True)
        ran.extend(values_of(store.start(key, start).payload))
        if until == "it runs":
            return Healed()  # released by an operator, say
        store.finish(key, Finish(task_id, "d1", State.COMPLETED, 0, 0, merge=True))
        return heal(self, key, task_id)

    monkeypatch.setattr(StaleHolders, "heal", run_and_heal)
    second = index.call(2)

    assert ran == [[1], [2]]
    assert (second.outcome, second.id) == ("merged", first.id)
    assert [sent.id for sent in messages(app)] == [first.id]


def test_values_merged_into_a_caller_slower_than_the_grace_may_run_twice(local_app):
    index, store = Index(local_app), state_of(local_app).store
    key = index.call(0).unique_key
    store.release(key, None)

    def call(n: int, **fields: Any) -> Acquired:
        merge = {"merge": f'{{"doc_ids":[{n}]}}', "merge_max_bytes": 1000}
        return store.acquire(
            key, Claim(f"call {n}", "shop.index", "pswrt", 30_000, "merge", **merge, **fields)
        )

    def run(n: int) -> list[Any]:
        start = Start(f"call {n}", f"d{n}", "shop.index", 60_000, 60_000, merge=True)
        return values_of(store.start(key, start).payload)

    assert [call(1).outcome, call(2).outcome] == ["created", "merged"]
    advance(local_app, 31)  # neither has published it
    assert call(2).outcome == "created"

    assert [run(1), run(2)] == [[[1], [2]], [[2]]]


def test_a_task_whose_lease_lapsed_runs_with_all_values_and_later_calls_are_another_task(app):
    """A worker that was suspended had its message, which comes back."""
    index = Index(app)
    first, second = index.call(1), index.call(2)
    store = state_of(app).store
    start = Start(first.id, "d1", "shop.index", 60_000, 60_000, merge=True)
    assert values_of(store.start(first.unique_key, start).payload) == [[1], [2]]

    advance(app, 61)  # it renewed nothing
    third, fourth = index.call(3), index.call(4)

    assert second.id == first.id
    assert (third.outcome, fourth.outcome, fourth.id) == ("created", "merged", third.id)
    assert third.id != first.id
    lost: list[Any] = []

    def record(task_id: str, **_: Any) -> None:
        lost.append(task_id)

    unique_lost.connect(record)
    with working(app):
        assert (value_of(first), value_of(third)) == ([1, 2], [3, 4])
    assert lost == [first.id]
    assert sorted(values for _, values in index.ran) == [[1, 2], [3, 4]]


def test_values_of_calls_that_raised_run_where_one_of_their_messages_has_arrived(app):
    """The publish raises in the caller of a task, and again in a call that was merged into it,
    although a worker has that message."""
    index = Index(app)
    publish = app.amqp.send_task_message

    def refused(*_: Any, **__: Any) -> Any:
        app.amqp.send_task_message = arrives
        with pytest.raises(OperationalError, match="no reply"):
            index.call(2)  # merged into the task that is about to be published
        raise OperationalError("refused")

    def arrives(*args: Any, **options: Any) -> Any:
        app.amqp.send_task_message = publish
        publish(*args, **options)
        assert index.began.wait(20)
        raise OperationalError("no reply")

    app.amqp.send_task_message = refused
    with working(app):
        with pytest.raises(OperationalError, match="refused"):
            index.call(1)
        third = index.call(3)
        assert value_of(third) == [3]

    assert [values for _, values in index.ran] == [[1, 2], [3]]
    assert locks(app) == []


def test_revoking_the_task_revokes_the_calls_merged_into_it(app):
    index = Index(app)
    first = index.call(1)
    second = index.call(2)

    second.revoke()
    flush(app)

    assert first.id == second.id
    third = index.call(3)
    with working(app):
        assert value_of(third) == [3]
    assert [values for _, values in index.ran] == [[3]]


def test_a_released_task_runs_with_what_was_merged_before(app):
    index = Index(app)
    first, second = index.call(1), index.call(2)
    assert second.id == first.id

    assert release(index.task, (7, []))
    third = index.call(3)

    assert third.outcome == "created"
    with working(app):
        assert (value_of(first), value_of(third)) == ([1, 2], [3])


def test_a_task_that_replaces_itself_goes_on_with_its_own_arguments(app):
    ran: list[list[int]] = []

    @app.task(bind=True, unique=True, unique_on_conflict="merge", unique_merge="left", shared=False)
    def work(self: Any, left: list[int]) -> Any:
        ran.append(left)
        if len(left) > 1:
            raise self.replace(work.s(left[1:]))
        return left

    first = work.delay([1])
    work.delay([2])

    with working(app):
        assert value_of(first) == [2]
    assert ran == [[1, 2], [2]]


def test_a_store_that_does_not_answer_at_the_gate_delays_the_task_and_loses_no_value():
    app = make_app("memory://")
    index = Index(app)
    first = index.call(1)
    index.call(2)
    gate_store: Any = state_of(app).gate_store
    start, failures = gate_store.start, iter(range(2))

    def unavailable(key: str, asked: Any) -> Any:
        if next(failures, None) is not None:
            raise StoreUnavailable("no answer")
        return start(key, asked)

    gate_store.start = unavailable

    with working(app):
        assert value_of(first) == [1, 2]
    assert len(index.ran) == 1


@pytest.mark.server
def test_a_store_that_lost_its_data_runs_the_task_with_the_values_of_its_message(redis_url):
    app = make_app(redis_url)
    index = Index(app)
    first = index.call(1)
    index.call(2)
    with redis.Redis.from_url(redis_url) as server:
        server.flushdb()

    with working(app):
        assert value_of(first) == [1]


class Codec:
    """Not a cipher, but nothing that it encodes can be read."""

    def encode(self, text: bytes) -> bytes:
        return text[::-1].hex().encode()

    def decode(self, encoded: bytes) -> bytes:
        return bytes.fromhex(encoded.decode())[::-1]


@pytest.mark.server
def test_a_codec_encodes_the_values_in_the_store(redis_url):
    app = make_app(redis_url, broker="memory://", unique_follower_codec=Codec())
    index = Index(app)
    first = index.call("a secret")
    index.call("another secret")

    with redis.Redis.from_url(redis_url) as server:
        stored = [server.hgetall(key) for key in server.scan_iter("cu:*") if b"}p" in key]
    with working(app):
        assert value_of(first) == ["a secret", "another secret"]

    assert len(stored) == 1
    assert b"secret" not in b"".join(stored[0].values())


def test_a_worker_that_cannot_decode_the_values_fails_the_task_and_frees_its_key():
    app = make_app(unique_follower_codec=Codec())
    index = Index(app)
    first = index.call(1)
    index.call(2)
    app.conf.unique_follower_codec = None

    with working(app), pytest.raises(Exception, match="set the one that the callers have"):
        first.get(timeout=20, interval=0.01)

    eventually(lambda: locks(app) == [])
    assert index.ran == []


# -- the message is lost ------------------------------------------------------------------


CHECK_AFTER_S = 60


@pytest.mark.server
def test_a_task_whose_message_is_lost_is_published_again_with_the_values_of_all_calls(redis_url):
    app = make_app(broker=redis_url, backend=redis_url)
    index = Index(app)
    first = index.call(1)
    index.call(2)
    app.control.purge()
    advance(app, CHECK_AFTER_S + 1)

    later = index.call(3)
    with working(app):
        assert first.get(timeout=20) == [1, 2, 3]

    assert (later.outcome, later.id) == ("merged", first.id)
    assert index.ran == [(first.id, [1, 2, 3])]
    eventually(lambda: locks(app) == [])


@pytest.mark.server
def test_the_first_of_a_line_whose_message_is_lost_is_published_again(redis_url):
    app = make_app(broker=redis_url, backend=redis_url)
    index = Index(app, unique_merge_max_bytes=len('{"doc_ids":[1]}') * 2)
    first = index.call(1)
    index.call(2)
    app.control.purge()
    second = index.call(3)
    advance(app, CHECK_AFTER_S + 1)

    later = index.call(4)
    with working(app):
        assert second.get(timeout=20) == [3, 4]

    assert (second.outcome, later.outcome, later.id) == ("rerun", "merged", second.id)
    assert index.ran == [(first.id, [1, 2]), (second.id, [3, 4])]


def test_a_task_that_a_worker_without_the_library_has_run_runs_again_with_all_values(app):
    index = Index(app)
    first = index.call(1)
    index.call(2)
    # Such a worker consumes the message, runs it with the values in that, and stores the result.
    app.control.purge()
    app.backend.store_result(first.id, [1], "SUCCESS")
    advance(app, CHECK_AFTER_S + 1)

    later = index.call(3)
    with working(app):
        eventually(lambda: index.ran == [(first.id, [1, 2, 3])])

    assert (later.outcome, later.id) == ("merged", first.id)
    eventually(lambda: locks(app) == [])


@pytest.mark.server
def test_a_call_that_cannot_publish_a_lost_task_again_leaves_no_values(redis_url):
    app = make_app(broker=redis_url, backend=redis_url, unique_atomic_publish=False)
    index = Index(app)
    first = index.call(1)
    index.call(2)
    app.control.purge()
    advance(app, CHECK_AFTER_S + 1)

    replace_publish(app, raising(OperationalError()))
    with pytest.raises(OperationalError):
        index.call(3)
    record, now = state_of(app).store.read(first.unique_key)
    assert record.tasks[first.id].is_abandoned(now), "the next call would not publish it"
    index.call(4)
    with working(app):
        assert first.get(timeout=20) == [1, 2, 4]


def test_another_task_of_the_same_key_is_a_successor(app):
    ran = []
    merging = {"unique_on_conflict": "merge", "unique_merge": "doc_ids", "unique": True}

    @app.task(name="shop.add", unique_group="shop:{shop}", **merging)
    def add(shop, doc_ids):
        ran.append(("add", doc_ids))

    @app.task(name="shop.remove", unique_group="shop:{shop}", **merging)
    def remove(shop, doc_ids):
        ran.append(("remove", doc_ids))

    results = [add.delay(7, [1]), remove.delay(7, [2]), remove.delay(7, [3])]
    flush(app)
    with working(app):
        eventually(lambda: len(ran) == 2)

    assert [result.outcome for result in results] == ["created", "rerun", "merged"]
    assert ran == [("add", [1]), ("remove", [2, 3])]


# -- seen by others -----------------------------------------------------------------------


def test_the_fixture_for_tests_of_users_shows_what_is_merged():
    app = make_app()
    index = Index(app)
    with locks_in_memory(app) as unique_locks:
        first = index.task.delay(7, [1])
        again = index.task.delay(7, [2])

        assert_merged(again, into=first)
        assert unique_locks.merged(index.task, (7, [])) == {"doc_ids": [1, 2]}
        assert unique_locks.merged(index.task, (8, [])) == {}
        with pytest.raises(AssertionError, match="the call was created"):
            assert_merged(first)


def test_a_call_is_explained_as_merged(app):
    index = Index(app)
    assert explain_call(state_of(app), "shop.index", (7, [1]), {}).verdict.outcome == "created"
    first = index.call(1)

    explained = explain_call(state_of(app), "shop.index", (7, [2]), {})

    verdict = explained.verdict
    assert (verdict.outcome, verdict.task_id) == ("merged", first.id)
    assert explained.policy["merge"] == ["doc_ids"]
    assert [lock.as_document()["merges"] for lock in explained.locks] == [True]
    assert [sent.args for sent in messages(app)] == [[7, [1]]]
