"""Sixteen processes that bring the same idempotency key at the same moment, and a real worker
whose finished tasks answer for their keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

import celery_unique
from celery_unique import IdempotencyKeyConflict
from tests.stores.racing import PROCESSES, ROUNDS, Racers, overlap_of
from tests.support.stage import Stage
from tests.workers.conftest import MakeStage
from tests.workers.idempotency_racers import Keyed, keyed_racer

STORES = [
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
]


def problems(number: int, answers: list[Keyed]) -> Iterator[str]:
    """What is wrong with a round: one task is created, whoever wants the same is told its id,
    and whoever wants something else is told of the conflict and nothing more."""
    created = [answer for answer in answers if answer.outcome == "created"]
    if len(created) != 1:
        yield f"round {number}: {len(created)} tasks were created"
        return
    [winner] = created
    for answer in answers:
        same = answer.amount == winner.amount
        told = (answer.outcome, answer.task_id)
        if answer is winner:
            continue
        if told != (("deduplicated", winner.task_id) if same else ("conflict", "")):
            yield f"round {number}: {winner} won, {answer} was told otherwise"
    published = {each for answer in answers for each in answer.published}
    if published != {(winner.task_id, winner.amount)}:
        yield f"round {number}: {winner} won, but published was {published}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", STORES)
def test_of_calls_with_one_key_at_once_one_is_a_task_and_others_never_get_its_result(
    request, report, store
):
    """Half of the callers bring the key with other arguments than the other half."""
    url = request.getfixturevalue(store)
    began = time.monotonic()

    with Racers() as racers:
        rounds = racers.race(keyed_racer, url, "race", 2)

    took_s = time.monotonic() - began
    wrong = [
        problem
        for number, calls in enumerate(rounds)
        for problem in problems(number, [call.answer for call in calls])
    ]
    outcomes = Counter(call.answer.outcome for calls in rounds for call in calls)
    overlap = overlap_of(rounds)
    report(
        f"one idempotency key on {store.removesuffix('_url')}: {PROCESSES} processes, two "
        f"different calls, {len(rounds)} rounds, {len(wrong)} wrong; {dict(outcomes)}; "
        f"{overlap}; {took_s:.1f} s"
    )
    assert wrong == []
    assert outcomes["created"] == ROUNDS
    assert outcomes["deduplicated"] == ROUNDS * (PROCESSES // 2 - 1)
    assert outcomes["conflict"] == ROUNDS * (PROCESSES // 2)
    assert overlap.share >= 0.9


# -- a real worker ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["prefork", "threads"])
def stage(request: pytest.FixtureRequest, make_stage: MakeStage) -> Stage:
    return make_stage(pool=request.param)


@pytest.fixture(autouse=True)
def _has_a_worker(request: pytest.FixtureRequest) -> None:
    if "stage" in request.fixturenames:
        request.getfixturevalue("stage").ensure_worker()


@pytest.mark.slow
def test_a_finished_key_answers_with_the_stored_result(stage, tag):
    succeed = stage.app.tasks["succeed"]
    first = succeed.apply_async((tag,), idempotency_key=f"order-{tag}")
    stage.end_of(first, "SUCCESS")

    for _ in range(3):
        again = succeed.apply_async((tag,), idempotency_key=f"order-{tag}")
        assert (again.id, again.outcome, again.holder_state) == (
            first.id,
            "deduplicated",
            "completed",
        )
        assert stage.end_of(again, "SUCCESS") == tag
    with pytest.raises(IdempotencyKeyConflict):
        succeed.apply_async((f"other-{tag}",), idempotency_key=f"order-{tag}")

    assert stage.props.runs(tag) == 1
    lock = celery_unique.lookup(succeed, idempotency_key=f"order-{tag}")
    assert lock is not None
    assert (lock.state, lock.task_id) == ("completed", first.id)


@pytest.mark.slow
def test_a_running_key_answers_with_the_result_to_come(stage, tag):
    hold = stage.app.tasks["hold"]
    first = hold.apply_async((tag,), idempotency_key=f"order-{tag}", idempotency_ttl=1)
    stage.wait_for_run(tag)
    time.sleep(1.2)  # its time to live is over, and it is still at work

    again = hold.apply_async((tag,), idempotency_key=f"order-{tag}")

    assert (again.id, again.holder_state) == (first.id, "active")
    stage.props.let_go(tag)
    assert stage.end_of(again, "SUCCESS") == tag
    assert stage.props.runs(tag) == 1


@pytest.mark.slow
def test_a_failed_key_is_free_as_soon_as_the_failure_is_seen(stage, tag):
    fail = stage.app.tasks["fail"]
    first = fail.apply_async((tag,), idempotency_key=f"order-{tag}")
    stage.end_of(first, "FAILURE")

    again = fail.apply_async((tag,), idempotency_key=f"order-{tag}")

    assert (again.outcome, again.id != first.id) == ("created", True)
    stage.end_of(again, "FAILURE")
    assert stage.props.runs(tag) == 2
