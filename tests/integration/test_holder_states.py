"""In which state a duplicate finds its holder, also before the store has heard of the publish."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique import DuplicateTask, apply_many
from celery_unique.config.app_state import state_of
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores.base import Start
from tests.support.app import advance

DELAYS = pytest.mark.parametrize(
    ("options", "state"), [({}, "available"), ({"countdown": 60}, "scheduled")]
)


@pytest.fixture
def told(received: Any) -> Any:
    """What the signal of a conflict sends."""
    return received(celery_unique.unique_conflict)


@pytest.fixture
def _confirmations_are_slow(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one way: none has arrived when the next call asks."""
    store = state_of(app).store
    monkeypatch.setattr(store, "confirm", lambda *_: None)
    monkeypatch.setattr(store, "confirm_many", lambda *_: None)


def as_if_published_elsewhere(app: Celery) -> None:
    state_of(app).part(UniqueTaskCoordinator).client.published.clear()


@DELAYS
@pytest.mark.parametrize("on_conflict", ["ignore", "reject"])
def test_a_duplicate_in_the_same_batch(rebuild, told, options, state, on_conflict):
    call = rebuild.s(1).set(**options, unique_on_conflict=on_conflict)

    first, again = apply_many([call, call.clone()])

    if on_conflict == "ignore":
        assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", state)
    else:
        assert isinstance(again, DuplicateTask)
        assert (again.task_id, again.state) == (first.id, state)
    assert [facts["state"] for facts in told] == [state]


@DELAYS
@pytest.mark.parametrize(
    ("own", "outcome"), [({}, "deduplicated"), ({"task_id": "mine"}, "joined")]
)
@pytest.mark.usefixtures("_confirmations_are_slow")
def test_a_duplicate_of_what_this_process_has_just_published(
    rebuild, told, options, state, own, outcome
):
    rebuild.apply_async((1,), **options)

    again = rebuild.apply_async((1,), **own)

    assert (again.outcome, again.holder_state) == (outcome, state)
    assert [facts["state"] for facts in told] == [state]


@DELAYS
@pytest.mark.usefixtures("_confirmations_are_slow")
def test_a_rejected_duplicate_of_what_this_process_has_just_published(
    rebuild, told, options, state
):
    rebuild.apply_async((1,), **options)

    with pytest.raises(DuplicateTask) as raised:
        rebuild.apply_async((1,), unique_on_conflict="reject")

    assert raised.value.state == state
    assert [facts["state"] for facts in told] == [state]


@pytest.mark.usefixtures("_confirmations_are_slow")
def test_the_stores_clock_tells_whether_the_eta_lies_ahead(app, rebuild):
    rebuild.apply_async((1,), countdown=5)
    advance(app, 6)

    assert rebuild.delay(1).holder_state == "available"


@DELAYS
@pytest.mark.usefixtures("_confirmations_are_slow")
def test_a_duplicate_that_helps_another_process_to_publish(app, rebuild, options, state):
    first = rebuild.apply_async((1,), **options)
    as_if_published_elsewhere(app)

    again = rebuild.delay(1)

    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", state)


@pytest.mark.usefixtures("_confirmations_are_slow")
def test_a_call_that_is_rejected_promises_nothing_of_what_another_process_publishes(app, rebuild):
    rebuild.apply_async((1,), countdown=60)
    as_if_published_elsewhere(app)

    with pytest.raises(DuplicateTask) as raised:
        rebuild.apply_async((1,), unique_on_conflict="reject")

    assert raised.value.state == "pending"


@pytest.mark.usefixtures("_confirmations_are_slow")
def test_a_holder_that_is_looked_at_again_is_told_of_as_it_then_is(app, rebuild, monkeypatch):
    first = rebuild.delay(1)
    as_if_published_elsewhere(app)
    store = state_of(app).store
    read = store.read

    def start_and_read(key: str) -> Any:
        store.start(key, Start(first.id, "w1/1/1/1", rebuild.name, 60_000, 60_000))
        return read(key)

    monkeypatch.setattr(store, "read", start_and_read)

    again = rebuild.delay(1)

    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", "active")
