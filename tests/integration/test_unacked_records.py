"""What kombu records in Redis of the messages that a worker has, written by the store."""

from __future__ import annotations

import inspect
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection
from kombu.asynchronous import Hub
from kombu.transport.redis import Channel, QoS
from redis.exceptions import ResponseError

from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER, LockHeader
from celery_unique.worker.ack import RECORDS, Acknowledgement, record_by_store
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import RedisServer
from tests.support.app import make_app

pytestmark = [pytest.mark.server, pytest.mark.versions]

QUEUE = "shop"
GATE_TIMEOUT_S = 0.25


class Place:
    """A broker's database, a channel to it, and the lock client of a worker."""

    def __init__(self, server: RedisServer, url: str, store_url: str, **options: Any) -> None:
        self._connection = Connection(url, transport_options=options)
        self.channel: Any = self._connection.channel()
        self.connection_errors = self._connection.connection_errors
        self.prefix = options.get("global_keyprefix", "")
        app = make_app(store_url, broker_url=url, unique_gate_timeout=GATE_TIMEOUT_S)
        self._store = state_of(app).store
        self.client = state_of(app).part(WorkerLockClient)
        self.redis = server.client(int(url.rpartition("/")[2]))

    def message(self, *, unique: bool = True) -> Any:
        lock = {HEADER: LockHeader("a", "1:00").as_message()} if unique else {}
        payload = {
            "body": "e30=",
            "headers": {"id": "a", "task": "shop.rebuild", **lock},
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "properties": {
                "delivery_tag": str(uuid.uuid4()),
                "delivery_info": {"exchange": "", "routing_key": QUEUE},
                "body_encoding": "base64",
            },
        }
        return self.channel.Message(payload, channel=self.channel)

    def append(self, message: Any) -> None:
        self.channel.qos.append(message, message.delivery_tag)

    def received(self, message: Any) -> None:
        """As a request is made of it."""
        self.append(message)
        records = getattr(self.channel, RECORDS, None)
        if records is not None:
            records.confirm()

    def recorded(self, message: Any) -> tuple[Any, float | None]:
        text = self.redis.hget(f"{self.prefix}unacked", message.delivery_tag)
        since = self.redis.zscore(f"{self.prefix}unacked_index", message.delivery_tag)
        return text and json.loads(text), since

    def close(self) -> None:
        self.channel.qos._delivered.clear()  # nothing goes back to the queue
        self._connection.release()
        self._store.close()
        self.redis.close()


@pytest.fixture
def place_of(redis_server: RedisServer) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(store_url: str = "", **options: Any) -> Place:
        url = redis_server.fresh_url()
        places.append(Place(redis_server, url, store_url or url, **options))
        return places[-1]

    yield make
    for place in places:
        place.close()


@pytest.fixture
def kombus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kombu has recorded itself."""
    acts: list[str] = []
    for name in ("append", "ack"):
        own = getattr(QoS, name)

        def recorded(*args: Any, name: str = name, own: Any = own) -> Any:
            acts.append(name)
            return own(*args)

        monkeypatch.setattr(QoS, name, recorded)
    return acts


@pytest.fixture
def place(place_of: Callable[..., Place], kombus: list[str]) -> Place:
    place = place_of()
    record_by_store(place.channel, place.client)
    return place


@pytest.mark.parametrize("prefix", ["", "shop-"])
def test_the_records_are_those_of_kombu(place_of, kombus, prefix):
    place = place_of(global_keyprefix=prefix)
    message = place.message()
    place.received(message)
    by_kombu, since = place.recorded(message)
    place.channel.qos.ack(message.delivery_tag)
    assert place.recorded(message) == (None, None)
    assert kombus.copy() == ["append", "ack"]

    record_by_store(place.channel, place.client)
    place.received(message)

    text, since_now = place.recorded(message)
    assert text == by_kombu
    assert since_now == pytest.approx(since, abs=60)
    assert list(place.channel.qos._delivered) == [message.delivery_tag]
    message.ack()
    assert place.recorded(message) == (None, None)
    assert kombus == ["append", "ack"]


def test_kombu_restores_what_the_store_has_recorded(place):
    message = place.message()
    place.received(message)

    place.channel.qos.restore_by_tag(message.delivery_tag)

    [restored] = place.redis.lrange(QUEUE, 0, -1)
    assert json.loads(restored)["body"] == message._raw["body"]
    assert json.loads(restored)["headers"]["redelivered"] is True
    assert place.recorded(message) == (None, None)


@pytest.mark.parametrize("requeue", [False, True])
def test_kombu_rejects_what_the_store_has_recorded(place, requeue):
    message = place.message()
    place.append(message)

    message.reject(requeue=requeue)

    assert place.recorded(message) == (None, None)
    assert place.redis.llen(QUEUE) == int(requeue)


@pytest.mark.parametrize("act", ["ack", "reject", "requeue", "restore"])
def test_a_record_is_there_before_it_is_used(place, act):
    """The store is slow to write the record: what is done with it waits."""
    message = place.message()
    place.received(place.message())  # connected
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 400), "WRITE")
    place.append(message)

    if act == "restore":
        place.channel.qos.restore_by_tag(message.delivery_tag)
    else:
        getattr(message, act)()

    assert place.recorded(message) == (None, None)
    assert place.redis.llen(QUEUE) == int(act in ("requeue", "restore"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def _turn(hub: Hub) -> None:
    for callback in hub._pop_ready():
        callback()


def test_an_early_acknowledgement_is_confirmed_in_the_next_turn_of_the_loop(place, hub, kombus):
    record_by_store(place.channel, place.client, hub)
    message = place.message()
    place.received(message)
    pause_ms = int(GATE_TIMEOUT_S * 400)
    place.redis.execute_command("CLIENT", "PAUSE", pause_ms, "WRITE")

    message.ack()
    assert place.recorded(message)[0] is not None  # sent, and not waited for
    _turn(hub)

    assert place.recorded(message) == (None, None)
    assert kombus == []


def test_an_early_acknowledgement_that_is_not_confirmed_is_sent_by_kombu(place, hub, kombus):
    record_by_store(place.channel, place.client, hub)
    message = place.message()
    place.received(message)
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 2000), "ALL")

    message.ack()
    assert kombus == []
    _turn(hub)

    assert kombus == ["ack"]
    assert place.recorded(message) == (None, None)


def test_an_early_acknowledgement_that_fails_is_logged_as_by_celery(place_of, hub, caplog):
    place = place_of(socket_timeout=0.05)
    record_by_store(place.channel, place.client, hub)
    message = place.message()
    place.received(message)
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 4000), "ALL")
    message.ack()

    _turn(hub)

    assert f"cannot acknowledge message {message.delivery_tag}" in caplog.text


def test_a_message_whose_acknowledgement_fails_is_still_here(place_of, hub):
    """As with kombu: it goes back to the queue with the channel."""
    place = place_of(socket_timeout=0.05)
    record_by_store(place.channel, place.client, hub)
    message = place.message()
    place.received(message)
    acknowledgement = Acknowledgement(message)
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 4000), "ALL")

    with pytest.raises(place.connection_errors):
        message.ack()

    assert acknowledgement.failed
    place.channel.qos._flush()
    assert list(place.channel.qos._delivered) == [message.delivery_tag]


def test_an_acknowledgement_that_something_waits_for_is_confirmed_at_once(place, hub):
    record_by_store(place.channel, place.client, hub)
    message = place.message()
    place.received(message)
    acts: list[Any] = []
    Acknowledgement(message).then(lambda: acts.append(place.recorded(message)))

    message.ack()

    assert acts == [(None, None)]


def test_other_messages_are_recorded_by_kombu(place, kombus):
    message = place.message(unique=False)

    place.received(message)
    assert place.recorded(message)[0] is not None
    message.ack()

    assert place.recorded(message) == (None, None)
    assert kombus == ["append", "ack"]


def test_what_the_store_does_not_confirm_in_time_kombu_records(place, kombus):
    message = place.message()
    place.received(place.message())  # connected
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 2000), "ALL")

    place.received(message)
    assert kombus == ["append"]
    assert place.recorded(message)[0] is not None
    place.redis.execute_command("CLIENT", "PAUSE", int(GATE_TIMEOUT_S * 2000), "ALL")
    message.ack()

    assert kombus == ["append", "ack"]
    assert place.recorded(message) == (None, None)


def test_a_connection_that_the_server_has_closed_is_replaced(place, kombus):
    place.received(place.message())
    place.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    message = place.message()

    place.received(message)

    assert place.recorded(message)[0] is not None
    assert kombus == []


def test_while_the_store_fails_at_the_gate_kombu_records(place, kombus):
    _, breaker = place.client.at_broker(place.channel)
    breaker.failures = 1
    message = place.message()

    place.received(message)

    assert kombus == ["append"]


@pytest.mark.parametrize("name", ["unacked", "unacked_index"])
def test_what_the_server_refuses_is_refused_as_by_kombu(place, kombus, name):
    place.redis.set(name, "of another type")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        place.received(place.message())

    assert kombus == ["append"]


def test_after_a_change_of_the_settings_the_new_client_records(place, place_of):
    elsewhere = place_of()

    record_by_store(place.channel, elsewhere.client)

    assert not {"append", "ack"} & place.channel.qos.__dict__.keys()


def test_a_store_elsewhere_records_nothing(place_of, redis_server):
    place = place_of(redis_server.fresh_url())

    record_by_store(place.channel, place.client)

    assert not {"append", "ack"} & place.channel.qos.__dict__.keys()


@pytest.mark.parametrize("own", ["channel", "qos"])
def test_a_class_of_the_user_s_own_is_left_as_it_is(place, own, monkeypatch):
    class OwnChannel(Channel):
        pass

    class OwnQoS(QoS):
        pass

    if own == "channel":
        place.channel.__class__ = OwnChannel
    else:
        place.channel._qos = OwnQoS(place.channel)
    for name in ("append", "ack"):
        place.channel.qos.__dict__.pop(name, None)

    record_by_store(place.channel, place.client)

    assert not {"append", "ack"} & place.channel.qos.__dict__.keys()


def test_another_broker_is_left_as_it_is(place):
    with Connection("memory://") as connection:
        channel = connection.channel()

        record_by_store(channel, place.client)

        assert not {"append", "ack"} & channel.qos.__dict__.keys()


def test_what_is_relied_on_of_kombu_is_there():
    """Not documented: the store writes what these write."""
    append, ack = inspect.getsource(QoS.append), inspect.getsource(QoS.ack)
    assert ".zadd(self.unacked_index_key" in append
    assert ".hset(self.unacked_key, delivery_tag," in append
    assert "dumps([message._raw, EX, RK])" in append
    assert "super().append(message, delivery_tag)" in append
    assert "self._remove_from_indices(delivery_tag).execute()" in ack
    assert "super().ack(delivery_tag)" in ack
    remove = inspect.getsource(QoS._remove_from_indices)
    assert ".zrem(self.unacked_index_key, delivery_tag)" in remove
    assert ".hdel(self.unacked_key, delivery_tag)" in remove


def test_the_time_of_a_record_is_that_of_this_machine(place):
    before = time.time()
    message = place.message()

    place.received(message)

    _, since = place.recorded(message)
    assert before - 1 <= since <= time.time() + 1
