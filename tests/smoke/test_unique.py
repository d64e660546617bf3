"""Unique tasks through pytest-celery's setup: on each of its brokers, with a real worker."""

from __future__ import annotations

import pytest
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup

import celery_unique
from celery_unique import DuplicateTask


@pytest.fixture
def setup(celery_setup: CeleryTestSetup) -> CeleryTestSetup:
    celery_unique.install(celery_setup.app)
    return celery_setup


def test_a_burst_of_equal_calls_is_one_task_and_its_key_is_free_at_the_end(
    setup: CeleryTestSetup,
) -> None:
    add, queue = setup.app.tasks["smoke.unique_add"], "burst"  # consumed when all calls are made

    burst = [add.apply_async((3, 4), queue=queue) for _ in range(20)]

    assert {result.id for result in burst} == {burst[0].id}
    assert [result.deduplicated for result in burst] == [False] + [True] * 19
    setup.app.control.add_consumer(queue)
    assert burst[-1].get(timeout=RESULT_TIMEOUT) == 7
    after = add.apply_async((3, 4), queue=queue)
    assert after.outcome == "created"
    assert after.get(timeout=RESULT_TIMEOUT) == 7


def test_a_rejected_call_names_the_holder_and_a_failure_frees_the_key(
    setup: CeleryTestSetup,
) -> None:
    refuse, queue = setup.app.tasks["smoke.refuse"], "refused"
    first = refuse.apply_async((-1,), queue=queue)

    with pytest.raises(DuplicateTask) as refused:
        refuse.apply_async((-1,), queue=queue)

    assert refused.value.task_id == first.id
    setup.app.control.add_consumer(queue)
    with pytest.raises(ValueError, match="-1"):
        first.get(timeout=RESULT_TIMEOUT)
    assert refuse.apply_async((-1,), queue=queue).outcome == "created"
