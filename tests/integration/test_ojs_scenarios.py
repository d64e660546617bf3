"""The conformance scenarios of the Open Job Spec's section 14, through the public API.

Each test is named for its scenario and runs on every kind of store. Scenario 6, ``replace``, is
in ``test_replacing.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_unique import DuplicateTask, InvalidPolicy, lookup
from tests.support import eventually
from tests.support.app import advance, flush, locks, messages, value_of, working

REJECT = {"keys": ["type", "args"], "on_conflict": "reject"}


def task_of(app: Celery, **options: Any) -> Any:
    @app.task(name="email.send", **options)
    def send(user_id: int, template: str = "welcome") -> str:
        return f"{template} to {user_id}"

    return send


# -- 1 ---------------------------------------------------------------------------------


def test_01_an_identical_call_is_rejected(app):
    send = task_of(app, unique=REJECT)
    first = send.delay(42)

    with pytest.raises(DuplicateTask) as rejected:
        send.delay(42)

    assert rejected.value.task_id == first.id
    assert rejected.value.to_ojs()["error"]["code"] == "duplicate"
    assert rejected.value.to_ojs()["error"]["details"]["existing_job_id"] == first.id
    assert [sent.id for sent in messages(app)] == [first.id]


def test_01_the_rejected_call_leaves_the_first_one_as_it_was(app):
    send = task_of(app, unique=REJECT)
    first = send.delay(42)
    flush(app)

    with pytest.raises(DuplicateTask):
        send.delay(42)

    lock = lookup(send, (42,))
    assert lock is not None
    assert (lock.task_id, lock.state, lock.duplicates) == (first.id, "available", 1)


# -- 2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"unique": {**REJECT, "args_keys": ["user_id"]}},
     {"unique": True, "unique_on": "user_id", "unique_on_conflict": "reject"}],
    ids=["document", "options"],
)  # fmt: skip
def test_02_arguments_that_are_not_named_do_not_count(app, options):
    send = task_of(app, **options)
    send.delay(42, template="welcome")

    with pytest.raises(DuplicateTask):
        send.delay(42, template="goodbye")
    other = send.delay(43, template="welcome")

    assert other.outcome == "created"
    assert len(messages(app)) == 2


# -- 3 ---------------------------------------------------------------------------------


def test_03_after_the_period_the_same_call_is_admitted(app):
    send = task_of(app, unique={**REJECT, "period": "PT1M"})
    first = send.delay(42)

    advance(app, 50)
    with pytest.raises(DuplicateTask):
        send.delay(42)
    advance(app, 10)
    again = send.delay(42)

    assert again.outcome == "created"
    assert [sent.id for sent in messages(app)] == [first.id, again.id]


def test_03_the_period_begins_with_the_first_call_and_not_with_a_rejected_one(app):
    send = task_of(app, unique={**REJECT, "period": "PT1M"})
    send.delay(42)

    advance(app, 50)
    with pytest.raises(DuplicateTask):
        send.delay(42)
    advance(app, 11)

    assert send.delay(42).outcome == "created"


# -- 4 and 5 ---------------------------------------------------------------------------


def test_04_a_completed_task_blocks_nobody_under_the_default_states(app):
    send = task_of(app, unique=REJECT)

    with working(app):
        assert value_of(send.delay(42)) == "welcome to 42"
        again = send.delay(42)

        assert again.outcome == "created"
        assert value_of(again) == "welcome to 42"


ALSO_COMPLETED = ["available", "active", "scheduled", "retryable", "pending", "completed"]


def test_05_a_completed_task_blocks_where_completed_is_one_of_the_states(app):
    send = task_of(app, unique={**REJECT, "states": ALSO_COMPLETED})

    with working(app):
        first = send.delay(42)
        value_of(first)

        with pytest.raises(DuplicateTask) as rejected:
            send.delay(42)

    assert (rejected.value.task_id, rejected.value.state) == (first.id, "completed")


def test_05_it_blocks_until_its_period_has_passed(app):
    policy = {**REJECT, "states": ALSO_COMPLETED, "period": "P7D"}
    send = task_of(app, unique=policy)

    with working(app):
        value_of(send.delay(42))
        with pytest.raises(DuplicateTask):
            send.delay(42)
        advance(app, 7 * 24 * 3600)

        assert send.delay(42).outcome == "created"


# -- 7 ---------------------------------------------------------------------------------


def test_07_an_ignored_call_gets_the_id_of_the_first(app):
    send = task_of(app, unique={**REJECT, "on_conflict": "ignore"})
    first = send.delay(42)
    flush(app)

    again = send.delay(42)

    assert (again.id, again.deduplicated, again.outcome) == (first.id, True, "deduplicated")
    assert (again.holder_state, again.unique_key) == ("available", first.unique_key)
    assert (first.deduplicated, first.outcome) == (False, "created")
    assert [sent.id for sent in messages(app)] == [first.id]


# -- 8 ---------------------------------------------------------------------------------


def test_08_with_the_queue_in_the_key_another_queue_is_other_work(app):
    send = task_of(app, unique={"keys": ["type", "queue"], "on_conflict": "reject"})
    queue_a, queue_b = f"{app.main}-a", f"{app.main}-b"

    send.apply_async((42,), queue=queue_a)
    on_b = send.apply_async((42,), queue=queue_b)
    with pytest.raises(DuplicateTask):
        send.apply_async((42,), queue=queue_b)

    assert on_b.outcome == "created"
    assert len(messages(app, queue_a)) == len(messages(app, queue_b)) == 1


# -- 9 ---------------------------------------------------------------------------------


def test_09_meta_without_names_is_refused_when_the_task_is_defined(app):
    with pytest.raises(InvalidPolicy) as refused:
        task_of(app, unique={"keys": ["meta"]}).delay(42)

    assert refused.value.field == "meta_keys"
    assert refused.value.to_ojs()["error"]["code"] == "invalid_request"
    assert messages(app) == []


def test_09_meta_without_names_is_refused_at_the_call(app):
    send = task_of(app)

    with pytest.raises(InvalidPolicy) as refused:
        send.apply_async((42,), unique={"keys": ["meta"]})

    assert refused.value.to_ojs()["error"]["code"] == "invalid_request"
    assert messages(app) == []
    assert locks(app) == []


# -- 10 --------------------------------------------------------------------------------


class Flaky(Exception):
    pass


def flaky_task(app: Celery, **options: Any) -> Any:
    @app.task(name="flaky", unique=REJECT, autoretry_for=(Flaky,), retry_backoff=False, **options)
    def flaky(user_id: int) -> None:
        raise Flaky

    return flaky


def test_10_a_task_that_waits_for_its_retry_blocks(app):
    flaky = flaky_task(app, retry_kwargs={"countdown": 3600})

    with working(app):
        first = flaky.delay(42)
        eventually(lambda: lookup(flaky, (42,)).state == "retryable")

        with pytest.raises(DuplicateTask) as rejected:
            flaky.delay(42)

    assert (rejected.value.task_id, rejected.value.state) == (first.id, "retryable")


def test_10_a_task_whose_retries_are_exhausted_frees_its_key(app):
    flaky = flaky_task(app, retry_kwargs={"countdown": 0, "max_retries": 1})

    with working(app):
        with pytest.raises(Flaky):
            value_of(flaky.delay(42))

        assert flaky.delay(42).outcome == "created"


# -- 11 --------------------------------------------------------------------------------


def race(call: Callable[[], Any], callers: int) -> list[Any]:
    """What became of each of these calls, made at once."""
    barrier = threading.Barrier(callers)

    def attempt(_: int) -> Any:
        barrier.wait()
        try:
            return call()
        except DuplicateTask as rejected:
            return rejected

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(attempt, range(callers)))


def test_11_of_concurrent_calls_exactly_one_is_admitted(app):
    send = task_of(app, unique=REJECT)

    for user_id in range(20):
        outcomes = race(lambda user_id=user_id: send.delay(user_id), callers=16)

        rejected = [each for each in outcomes if isinstance(each, DuplicateTask)]
        [winner] = [each for each in outcomes if not isinstance(each, DuplicateTask)]
        assert len(rejected) == 15
        assert {each.task_id for each in rejected} == {winner.id}
    assert len(messages(app)) == 20


def test_11_concurrent_calls_that_ignore_all_name_the_winner(app):
    send = task_of(app, unique=True)
    winners = set()

    for user_id in range(20):
        outcomes = race(lambda user_id=user_id: send.delay(user_id), callers=16)

        [winner] = {each.id for each in outcomes}
        assert sorted(each.outcome for each in outcomes) == ["created"] + ["deduplicated"] * 15
        winners.add(winner)
    # A slow winner may have been helped with a second message: of the same id.
    assert {sent.id for sent in messages(app)} == winners


# -- defaults that the document gives itself -------------------------------------------


@pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")
def test_a_document_without_keys_counts_the_type_alone_and_rejects(app):
    send = task_of(app, unique={})
    send.delay(1)

    with pytest.raises(DuplicateTask):
        send.delay(2)
