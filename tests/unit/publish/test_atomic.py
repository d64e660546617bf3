"""Lock and message in one act, on a store that records its acts and keeps the messages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.transport.redis import Channel, Transport

from celery_unique import StoreUnavailable, UniquePolicy
from celery_unique.config.settings import UniqueSettings
from celery_unique.header import HEADER
from celery_unique.publish.atomic import AtomicPublisher
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.publish.request import PublishRequest
from celery_unique.stores.base import LONGEST_TEXT, Acquired, Claim, Push
from celery_unique.stores.circuit_breaker import PushRefused
from tests.support import eventually
from tests.unit.publish.journal import KEY, LEASES, Journal, call

pytestmark = pytest.mark.versions

REDIS = SimpleNamespace(
    get_transport_cls=lambda: Transport,
    hostname="here",
    port=6379,
    virtual_host="0",
    userid="",
)


class Broker(Journal):
    """A journal that is the broker, too. ``silent``: it acts, and does not reply; ``refuses``: it
    pushes nothing."""

    address = ("here", 6379, 0, "", "")

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[str] = []
        self.silent: type[BaseException] | None = None
        self.refuses = False

    def begin_publish(
        self, pushes: list[tuple[str, Claim, Push]]
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        self.note("publish")
        replies: list[Acquired | StoreUnavailable]
        replies = [PushRefused("full") if self.refuses else self._publish(*one) for one in pushes]

        def receive() -> list[Acquired | StoreUnavailable]:
            if self.silent is not None:
                raise self.silent("no reply")
            return replies

        return receive

    def _publish(self, key: str, claim: Claim, push: Push) -> Acquired:
        acquired = super(Journal, self).acquire(key, claim)
        if acquired.outcome == "created":
            super(Journal, self).confirm(key, claim.task_id, push.lease_ms)
            self.queue.append(f"{push.head}{acquired.now}{push.middle}{push.tail}")
        return acquired

    def probe(self, key: str, claim: Claim) -> Acquired | None:
        self.note("probe")
        if all(task.released for task in self.read(key)[0].tasks.values()):
            return None
        return super(Journal, self).acquire(key, claim)

    def withdraw(self, *arguments: Any) -> str:
        self.note("withdraw")
        return "withdrawn"


class FakeChannel:
    """What the publisher uses of kombu's channel."""

    global_keyprefix = "shop:"
    connection = SimpleNamespace(client=REDIS)

    def _get_message_priority(self, *_: Any, **__: Any) -> int:
        return 0

    def _q_for_pri(self, queue: str, _: int) -> str:
        return queue


@pytest.fixture
def store() -> Broker:
    return Broker()


def coordinator_of(store: Broker, **settings: Any) -> UniqueTaskCoordinator:
    conf = SimpleNamespace(task_send_sent_event=False)
    app = SimpleNamespace(connection_for_write=lambda: REDIS, conf=conf)
    return UniqueTaskCoordinator(app, UniqueSettings(**settings), store, LEASES)


def published(
    store: Broker, task_id: str, *, body: str = "", exchange: str = "", puts: int = 1, **fields: Any
) -> PublishRequest:
    """A call whose ``send_task`` does what kombu does: ``puts`` messages pass its channel."""

    def send_task(name: str, args: Any, kwargs: Any, **options: Any) -> Any:
        header, channel = options["headers"][HEADER], FakeChannel()
        message = {
            "body": body,
            "headers": options["headers"],
            "properties": {"delivery_info": {"exchange": exchange}, "delivery_tag": "tag"},
        }
        for _ in range(puts):
            if not hasattr(header, "put") or header.put(channel, "celery", message, {}):
                store.note("kombu pushes")
        return SimpleNamespace(id=options["task_id"], header=dict(header))

    request = call(store, task_id, **fields)
    request.send_task = send_task
    return request


def test_a_new_call_is_one_act(store):
    outcome = coordinator_of(store).publish(published(store, "a"))

    assert store.acts == ["publish"]
    assert (outcome.task_id, outcome.facts.outcome) == ("a", "created")
    assert [task.pending for task in store.read(KEY)[0].tasks.values()] == [False]
    assert len(store.queue) == 1


def test_a_call_without_an_id_gets_one(store):
    outcome = coordinator_of(store).publish(published(store, ""))

    assert list(store.read(KEY)[0].tasks) == [outcome.task_id]
    assert f'"id": "{outcome.task_id}"' in store.queue[0]


def test_a_duplicate_of_this_process_is_probed_for_without_an_id(store):
    coordinator = coordinator_of(store)
    coordinator.publish(published(store, "a"))
    store.acts.clear()
    again = published(store, "")

    outcome = coordinator.publish(again)

    assert store.acts == ["probe"]
    assert (outcome.task_id, outcome.facts.deduplicated, again.task_id) == ("a", True, "")


def test_a_duplicate_of_another_process_is_one_act_and_pushes_nothing(store):
    coordinator_of(store).publish(published(store, "a"))
    store.acts.clear()

    outcome = coordinator_of(store).publish(published(store, "b"))

    assert store.acts == ["publish"]
    assert (outcome.task_id, len(store.queue)) == ("a", 1)


def test_a_call_that_may_be_merged_already_is_not_probed_for(store):
    """The second round of a call whose holder was not published yet: the store knows the attempt by
    its id, and merges its values once."""
    coordinator = coordinator_of(store)
    coordinator.publish(published(store, "a"))
    store.acts.clear()

    coordinator.publish(published(store, "b", may_be_merged=True))

    assert store.acts == ["publish"]


def test_a_key_that_is_free_again_is_published_after_the_probe(store):
    coordinator = coordinator_of(store)
    coordinator.publish(published(store, "a"))
    store.release(KEY)
    store.acts.clear()

    assert coordinator.publish(published(store, "b")).facts.outcome == "created"
    assert store.acts == ["probe", "publish"]


@pytest.mark.parametrize(
    "message", [{"body": "x" * LONGEST_TEXT}, {"exchange": "shop"}], ids=["long", "exchange"]
)
def test_a_message_that_kombu_pushes_takes_two_steps(store, message):
    outcome = coordinator_of(store).publish(published(store, "a", **message))

    assert store.acts == ["acquire", "kombu pushes", "confirm"]
    assert outcome.result.header["at"] > 0


@pytest.mark.parametrize("message", [{}, {"exchange": "shop"}], ids=["one act", "two steps"])
def test_a_message_that_passes_the_channel_again_is_admitted_once(store, message):
    """kombu repeats a publish after an error, and delivers to several queues."""
    coordinator_of(store).publish(published(store, "a", puts=2, **message))

    assert store.acts.count("publish") + store.acts.count("acquire") == 1
    assert len(store.queue) + store.acts.count("kombu pushes") == (2 if message else 1)


def test_a_message_that_does_not_pass_the_channel_has_no_lock(store, caplog):
    coordinator = coordinator_of(store)

    outcome = coordinator.publish(published(store, "a", puts=0))

    assert (store.acts, outcome.facts.outcome) == ([], "bypassed")
    assert "did not pass kombu's Redis channel" in caplog.text
    assert coordinator.atomic is None


def test_a_second_message_that_does_not_pass_the_channel_changes_no_other_way(store):
    """Two threads may be publishing when the first one is noticed."""
    coordinator = coordinator_of(store)
    other = coordinator.overlapped = SimpleNamespace(publishes=lambda _: False)
    way = coordinator.atomic

    for task_id in ("a", "b"):
        coordinator.passed_by(published(store, task_id), None, way)

    assert (coordinator.atomic, coordinator.overlapped) == (None, other)


def test_a_call_that_is_under_way_ends_in_one_act_when_another_one_is_passed_by(store):
    """The other one is of another thread, which disables the way in between."""
    coordinator = coordinator_of(store)
    way = coordinator.atomic
    publishes = way.publishes

    def passed_by_meanwhile(request: PublishRequest) -> bool:
        coordinator.atomic = None
        return publishes(request)

    way.publishes = passed_by_meanwhile

    assert coordinator.publish(published(store, "a")).facts.outcome == "created"
    assert store.acts == ["publish"]


@pytest.mark.parametrize("act", ["publish", "probe"])
def test_a_store_that_is_away_raises(store, act):
    coordinator = coordinator_of(store)
    if act == "probe":
        coordinator.publish(published(store, "first"))
    store.broken = {act}

    with pytest.raises(StoreUnavailable, match="away"):
        coordinator.publish(published(store, ""))

    assert "kombu pushes" not in store.acts


def test_without_a_reply_the_attempt_is_withdrawn(store):
    store.silent = StoreUnavailable

    with pytest.raises(StoreUnavailable, match="no reply"):
        coordinator_of(store).publish(published(store, "a"))

    eventually(lambda: "withdraw" in store.acts)
    assert "give_back" not in store.acts


def test_a_call_that_is_never_withdrawn_may_run_and_that_is_logged(store, caplog, monkeypatch):
    """Its task has its message, so that no lapse of a pending lock ends it."""
    tried: list[tuple[float, str]] = []

    def retry(_: str, __: str, ___: Any, within_s: float, *, otherwise: str, **____: Any) -> None:
        tried.append((within_s, otherwise))

    store.silent = StoreUnavailable
    coordinator = coordinator_of(store)
    monkeypatch.setattr(coordinator.client.retries, "retry", retry)
    with pytest.raises(StoreUnavailable):
        coordinator.publish(published(store, "a", delay_ms=1000))

    assert tried == [(61.0, "the task may run although its call raised")]


def test_a_call_whose_push_is_refused_leaves_nothing_to_withdraw(store):
    store.refuses = True
    coordinator, request = coordinator_of(store), published(store, "a")

    with pytest.raises(StoreUnavailable, match="full"):
        coordinator.publish(request)

    assert (request.attempt, coordinator.client.retries.waiting()) == ("", 0)


def test_a_call_whose_push_is_refused_and_that_is_published_anyway_has_no_copy(store):
    store.refuses = True
    coordinator = coordinator_of(store, on_store_error="publish")

    outcome = coordinator.publish(published(store, "a"))

    assert store.acts == ["publish", "kombu pushes"]
    assert "copies" not in outcome.result.header
    assert coordinator.client.retries.waiting() == 0


@pytest.mark.parametrize("together", [False, True])
def test_refused_pushes_open_no_circuit(store, together):
    coordinator = coordinator_of(store)
    client = coordinator.client
    store.refuses = True
    for task_id in ("a", "b"):
        request = published(store, task_id)
        if together:
            push = Push("celery", 1, "tag", "", "", "")
            [reply] = client.publish_many([(request, request.claim(), push)])
            assert isinstance(reply, PushRefused)
            assert request.attempt == ""
        else:
            with pytest.raises(StoreUnavailable, match="full"):
                coordinator.publish(request)
    store.refuses = False

    assert coordinator.publish(published(store, "c")).facts.outcome == "created"


def test_a_refused_push_in_a_batch_hides_no_failure(store):
    """What counts is that a part of the exchange has no reply."""
    client = coordinator_of(store).client
    requests = [published(store, task_id) for task_id in ("a", "b")]
    replies = [StoreUnavailable("no reply"), PushRefused("full")]
    store.begin_publish = lambda _: lambda: replies
    push = Push("celery", 1, "tag", "", "", "")

    client.publish_many([(request, request.claim(), push) for request in requests])

    assert client._breakers.of(KEY).failures == 1
    assert [request.attempt for request in requests] == ["tag", ""]


def test_a_call_that_is_interrupted_is_withdrawn(store):
    store.silent = KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinator_of(store).publish(published(store, "a"))

    eventually(lambda: "withdraw" in store.acts)


def test_a_replacement_without_a_reply_is_not_withdrawn(store, caplog):
    """What it has replaced is gone."""
    store.silent = StoreUnavailable
    replacing = UniquePolicy(on_conflict="replace")

    with pytest.raises(StoreUnavailable):
        coordinator_of(store).publish(published(store, "a", policy=replacing))

    eventually(lambda: "cannot withdraw" in caplog.text)
    assert "withdraw" not in store.acts


def test_a_call_that_is_published_anyway_says_that_there_may_be_two(store):
    store.silent = StoreUnavailable
    coordinator = coordinator_of(store, on_store_error="publish")

    outcome = coordinator.publish(published(store, "a"))

    assert store.acts == ["publish", "kombu pushes"]
    assert outcome.facts.outcome == "bypassed"
    assert (outcome.result.header["copies"], outcome.result.header["outcome"]) == (True, "bypassed")


def test_the_hook_is_in_kombu_once():
    AtomicPublisher(coordinator_of(Broker()).client)
    AtomicPublisher(coordinator_of(Broker()).client)

    assert Channel._put.__wrapped__.__qualname__ == "Channel._put"
    assert not hasattr(Channel._put.__wrapped__, "__wrapped__")
