"""A parent that runs again does not enqueue its children again: keys with the scope ``"run"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import Worker, eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options

pytestmark = pytest.mark.versions


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Iterator[Stage]:
    """Redis takes a message for lost after a second."""
    stage = make_stage(pool="threads", broker_transport_options=redis_broker_options(1))
    yield stage
    for worker in stage.workers:
        worker.kill()


@pytest.fixture
def workers(stage: Stage) -> list[Worker]:
    missing = 2 - sum(worker.is_running() for worker in stage.workers)
    stage.wait_until_ready(*[stage.start_worker(wait=False) for _ in range(missing)])
    return [worker for worker in stage.workers if worker.is_running()][-2:]


def calls(stage: Stage, tag: str) -> tuple[list[str], list[str]]:
    """The ids and the outcomes of the calls of children."""
    notes = stage.props.notes(tag, "called")
    return [note["id"] for note in notes], [note["outcome"] for note in notes]


def children(stage: Stage, tag: str) -> list[str]:
    return sorted(note["id"] for note in stage.props.notes(tag, "child"))


def test_a_parent_that_is_retried_enqueues_its_children_once(stage, workers, tag):
    result = stage.app.tasks["parent"].delay(tag, 2)
    stage.end_of(result, "SUCCESS")

    ids, outcomes = calls(stage, tag)
    assert [begin["retries"] for begin in stage.begins(tag)] == [0, 1, 2]
    assert ids == ids[:2] * 3
    assert outcomes == ["created"] * 2 + ["deduplicated"] * 4
    eventually(lambda: children(stage, tag) == sorted(ids[:2]))

    # Another run of the same call has children of its own.
    stage.end_of(stage.app.tasks["parent"].delay(tag, 2), "SUCCESS")
    again, outcomes = calls(stage, tag)
    assert outcomes[6:8] == ["created"] * 2
    assert not {*again[6:]} & {*ids}
    eventually(lambda: len(children(stage, tag)) == 4)
    assert children(stage, tag) == sorted({*again})


def test_a_parent_that_was_killed_enqueues_its_children_once(stage, workers, tag):
    result = stage.app.tasks["parent"].delay(tag, 0)
    first = stage.wait_for_begin(tag)
    killed = next(worker for worker in workers if worker.hostname == first["worker"])

    killed.kill()

    # The other worker may have had it meanwhile: it runs for longer than Redis waits.
    stage.wait_for_begin(tag, 2)
    stage.end_of(result, "SUCCESS")
    ids, outcomes = calls(stage, tag)
    assert len(ids) >= 4
    assert {*ids} == {*ids[:2]}
    assert outcomes.count("created") == 2
    eventually(lambda: children(stage, tag) == sorted(ids[:2]))
