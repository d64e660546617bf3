"""The order of acts around one lock, on a store that records them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_unique import DuplicateTask, IdempotencyKeyConflict, StoreUnavailable, UniquePolicy
from celery_unique.config.settings import UniqueSettings
from celery_unique.publish import coordinator as module
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores.base import Start
from celery_unique.stores.circuit_breaker import StoreSkipped
from tests.support import eventually
from tests.unit.publish.journal import KEY, LEASES, Journal, call


@pytest.fixture
def store() -> Journal:
    return Journal()


@pytest.fixture
def coordinator(store: Journal, monkeypatch: pytest.MonkeyPatch) -> UniqueTaskCoordinator:
    monkeypatch.setattr(module, "READ_AGAIN_AFTER_S", ())
    return UniqueTaskCoordinator(SimpleNamespace(), UniqueSettings(), store, LEASES)


def test_a_new_call_acquires_publishes_and_confirms(store, coordinator):
    outcome = coordinator.publish(call(store, "a"))

    assert store.acts == ["acquire", "send", "confirm"]
    assert (outcome.task_id, outcome.facts.outcome) == ("a", "created")
    assert outcome.result.header["key"] == KEY


def test_a_failed_publish_releases_the_key(store, coordinator):
    store.broken = {"send"}

    with pytest.raises(StoreUnavailable, match="away"):  # what send raised, whatever it is
        coordinator.publish(call(store, "a"))

    assert store.acts == ["acquire", "send", "give_back"]
    assert not store.read(KEY)[0].tasks


def test_a_duplicate_of_a_published_holder_is_one_act(store, coordinator):
    coordinator.publish(call(store, "a"))
    store.acts.clear()

    outcome = coordinator.publish(call(store, "b"))

    assert store.acts == ["acquire"]
    assert (outcome.task_id, outcome.facts.outcome) == ("a", "deduplicated")
    assert outcome.facts.deduplicated


def test_a_duplicate_of_an_unpublished_holder_publishes_it(store, coordinator):
    """Another process has acquired the key and not published: no call depends on it."""
    store.acquire(KEY, call(store, "a").claim())
    store.acts.clear()

    outcome = coordinator.publish(call(store, "b"))

    assert store.acts == ["acquire", "help", "send", "confirm"]
    assert outcome.task_id == "a"


@pytest.mark.parametrize("on_conflict", ["ignore", "reject", "rerun"])
def test_a_call_from_a_body_that_started_without_the_store_is_published(
    store, coordinator, on_conflict
):
    """Its own task seems to wait: the call would be lost as its duplicate."""
    coordinator.publish(call(store, "a"))
    store.acts.clear()
    policy = UniquePolicy(on_conflict=on_conflict)

    outcome = coordinator.publish(call(store, "b", parent=SimpleNamespace(id="a"), policy=policy))

    assert (outcome.task_id, outcome.facts.outcome) == ("b", "bypassed")
    assert store.acts == ["acquire", "send"]


def test_a_call_from_a_body_that_holds_its_lock_is_its_successor(store, coordinator):
    coordinator.publish(call(store, "a"))
    store.start(KEY, Start("a", "d1", "shop.rebuild", 60_000, 10_000, 60_000))

    outcome = coordinator.publish(call(store, "b", parent=SimpleNamespace(id="a")))

    assert (outcome.task_id, outcome.facts.deduplicated) == ("b", False)
    assert store.read(KEY)[0].tasks["b"].after == "a"


def test_calls_in_a_row_do_not_wait_for_their_own_confirmation(store, coordinator):
    store.late = {"confirm"}
    coordinator.publish(call(store, "a"))
    store.acts.clear()

    outcome = coordinator.publish(call(store, "b"))

    assert store.acts == ["acquire"]
    assert outcome.facts.holder_state == "available"


@pytest.mark.parametrize("on_conflict", ["reject", "replace"])
def test_a_running_holder_is_neither_replaced_nor_named_twice(store, coordinator, on_conflict):
    coordinator.publish(call(store, "a"))
    store.start(KEY, Start("a", "here/1/boot/1", "shop.rebuild", 1000, 1000, 1000))

    with pytest.raises(DuplicateTask) as rejected:
        coordinator.publish(call(store, "b", policy=UniquePolicy(on_conflict=on_conflict)))

    assert rejected.value.task_id == "a"
    assert "send" not in store.acts[3:]


def test_a_replacement_is_published_before_the_old_task_ends(store, coordinator):
    coordinator.publish(call(store, "a"))
    store.acts.clear()

    outcome = coordinator.publish(call(store, "b", policy=UniquePolicy(on_conflict="replace")))

    assert store.acts == ["acquire", "send", "confirm"]
    assert (outcome.facts.outcome, outcome.superseded) == ("replaced", ("a",))


def test_other_arguments_under_one_idempotency_key_raise(store, coordinator):
    coordinator.publish(call(store, "a", arguments="7"))

    with pytest.raises(IdempotencyKeyConflict):
        coordinator.publish(call(store, "b", arguments="8"))


def test_without_a_reply_the_call_raises_and_the_lock_is_withdrawn(store, coordinator):
    store.broken = {"acquire"}

    with pytest.raises(StoreUnavailable):
        coordinator.publish(call(store, "a"))

    assert "send" not in store.acts
    store.broken = set()
    eventually(lambda: "give_back" in store.acts)


def test_without_a_reply_the_call_is_published_where_that_is_configured(store):
    settings = UniqueSettings(on_store_error="publish")
    coordinator = UniqueTaskCoordinator(SimpleNamespace(), settings, store, LEASES)
    store.broken = {"acquire"}

    outcome = coordinator.publish(call(store, "a"))

    assert store.acts[:2] == ["acquire", "send"]
    assert outcome.facts.outcome == "bypassed"
    assert outcome.result.header["outcome"] == "bypassed"
    # The store may have acquired it. Released, its mark would drop the message.
    store.broken = set()
    eventually(lambda: "confirm" in store.acts)
    assert "give_back" not in store.acts


def test_after_two_failures_the_store_is_skipped(store, coordinator):
    store.broken = {"acquire"}
    for task_id in "ab":
        with pytest.raises(StoreUnavailable):
            coordinator.publish(call(store, task_id))
    store.acts.clear()

    with pytest.raises(StoreSkipped):
        coordinator.publish(call(store, "c"))

    assert "acquire" not in store.acts


def test_an_error_of_the_broker_is_raised_as_it_is(store, coordinator):
    def send_task(*_: Any, **__: Any) -> Any:
        raise OperationalError("no broker")

    with pytest.raises(OperationalError, match="no broker"):
        coordinator.publish(call(store, "a", send_task=send_task))

    assert store.acts == ["acquire", "give_back"]
